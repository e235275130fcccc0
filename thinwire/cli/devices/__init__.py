"""`thinwire devices`: the devices that may take part, and their enrollment by the aggregator's operator."""
