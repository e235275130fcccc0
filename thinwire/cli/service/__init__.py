"""Services of systemd that keep `thinwire aggregator start` and `thinwire client start` running."""
