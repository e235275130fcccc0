"""A stock Flower app: the other side of `benchmarks.round_overhead`."""
