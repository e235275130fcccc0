"""`thinwire privacy`: what the noised releases of an aggregator's runs have spent, of which population, on whom."""
