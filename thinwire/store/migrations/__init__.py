"""Migrations of the database, one step a file; store/schema.py runs them when a database is opened."""
