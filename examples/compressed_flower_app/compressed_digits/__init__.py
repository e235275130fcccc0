"""A plain Flower app whose updates Thinwire compresses."""
