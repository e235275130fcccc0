"""The lane: the routes of devices behind the door, and what is kept of them between two requests."""
