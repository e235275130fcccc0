"""`thinwire runs`: list, show, watch, compare and stop runs, and export their models."""
