"""`thinwire aggregator`: the service put together, whom it stands for, its page."""
