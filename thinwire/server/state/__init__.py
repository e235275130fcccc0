"""What a run has decided so far, as folds over its journal: a run that is taken up again knows the same."""
