"""This package will hold secure aggregation and differential privacy; it is still empty."""
