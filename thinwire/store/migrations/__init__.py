"""How the tables came to be, one step a file; run by store/schema.py when a database is opened."""
