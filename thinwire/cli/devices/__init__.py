"""`thinwire devices`: who may take part, as the aggregator's operator sees and decides it."""
