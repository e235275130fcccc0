"""One run, driven: its rounds are opened, asked, taken in and closed over a fleet, and each step is in the journal."""
