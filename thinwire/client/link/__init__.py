"""How the aggregator is reached: calls are made again until they go through, and a file says how that stands."""
