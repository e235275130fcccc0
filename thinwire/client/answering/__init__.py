"""From an ask to its answer, one step a file: the base model, the training, the frames, and what verdicts take back."""
