"""One file a revision, named by its number: 0001 comes first."""
