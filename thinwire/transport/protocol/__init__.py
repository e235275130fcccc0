"""The parts of the transport that both ends share: bodies, routes, refusals, signatures, messages and certificates."""
