"""The conformance suite of codecs, which any package can run on its own codec: `pytest --thinwire-codec mypkg:Mine`."""
