"""`thinwire aggregator`: start and stop the aggregator, its certificates, its dashboard, its backup."""
