"""The device's end of the transport. It needs the standard library and `cryptography`, but neither Flower nor torch."""
