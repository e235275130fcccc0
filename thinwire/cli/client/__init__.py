"""`thinwire client`: start a client, join and leave an aggregator, and show its state and logs."""
