"""The demo: real processes on this machine, watched, disturbed, measured and ended."""
