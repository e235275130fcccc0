"""A device's end of the wire. It needs neither flwr nor torch."""
