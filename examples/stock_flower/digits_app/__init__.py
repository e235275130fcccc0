"""The digits example as a Flower app."""
