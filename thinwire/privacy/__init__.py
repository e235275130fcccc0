"""Secure aggregation (docs/explain/secure-aggregation.md) and differential privacy, both without I/O."""
