"""One number, averaged."""
