"""Secure aggregation without I/O; its threat model is docs/explain/secure-aggregation.md. Privacy noise comes later."""
