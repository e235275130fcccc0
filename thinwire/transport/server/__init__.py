"""The aggregator's end of the transport: the device API, the limits for strangers, and what waits for each device."""
