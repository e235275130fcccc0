"""Delayed averaging on a thin line: see __main__.py."""
