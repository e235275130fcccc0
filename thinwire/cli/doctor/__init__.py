"""What the two doctors look at: one finding each, with what to do."""
