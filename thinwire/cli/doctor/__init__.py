"""The checks of `thinwire client doctor` and `thinwire aggregator doctor`, each with a finding and a hint."""
