"""The other side of `benchmarks.simulation`: scripts for an environment that has `flwr[simulation]`."""
