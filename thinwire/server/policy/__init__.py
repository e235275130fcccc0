"""Whom to ask, for what, in which codec and until when: pure decisions, and what is known of devices to decide by."""
