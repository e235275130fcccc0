"""The laws of a codec as tests that any package can run on its own: `pytest --thinwire-codec mypkg:Mine`."""
