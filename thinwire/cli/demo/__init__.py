"""`thinwire demo`: an aggregator and clients as real processes on this machine, with failures, measured and ended."""
