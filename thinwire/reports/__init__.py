"""This package explains runs from stored rows: time breakdowns, round explanations, sweeps and their comparison."""
