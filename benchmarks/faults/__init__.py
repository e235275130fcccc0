"""Measure what is lost, doubled or changed if something breaks in a run of real processes, and how soon it goes on."""
