"""The model on the aggregator: its versions on disk, the sum of a round, the step to the next one."""
