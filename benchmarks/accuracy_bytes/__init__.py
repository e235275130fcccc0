"""What accuracy each codec costs, and how many bytes it saves: the protocol and its evidence."""
