"""Wrap what a user of plain torch would take instead of ours: GRACE's and hivemind's methods, and torch's own hooks.

Written from their papers, a family a file. They get what favours them: whole segments of 64 MiB, no call a tensor, no
framing of what they would send, and no check for NaN.
"""
