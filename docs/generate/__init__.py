"""Write docs/reference/ from the code: `python -m docs.generate`. A test holds the committed pages against it."""
