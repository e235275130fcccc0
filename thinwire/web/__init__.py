"""The page: a process of its own that reads the store and leaves orders in it. Training never waits for it."""
