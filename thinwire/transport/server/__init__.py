"""The door: what strangers can reach, and every limit that they meet before a request exists."""
