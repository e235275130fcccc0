"""This package holds the state of a run, rebuilt from its journal, so that a resumed run knows what the killed one
knew.
"""
