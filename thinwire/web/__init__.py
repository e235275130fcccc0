"""The dashboard: a process of its own that reads the store and writes commands to it. Training never waits for it."""
