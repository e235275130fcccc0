"""Everything durable of an aggregator but its models: journal, read tables, orders, devices, logins, spool."""
