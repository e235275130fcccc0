"""Secure sums and differential privacy: their place in the house; the parts come with their own issues."""
