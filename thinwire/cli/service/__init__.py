"""`thinwire client service` and `thinwire aggregator service`: the start that was typed, kept going by systemd."""
