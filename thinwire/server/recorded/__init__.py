"""What a run has decided so far, read from its journal: a run that is taken up again knows the same."""
