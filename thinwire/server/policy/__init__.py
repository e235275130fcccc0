"""This package decides which devices get assignments, for how much work, in which codec and until when.

Its functions are pure: they return a decision with its reason. Its classes hold what the decisions are based on.
"""
