"""`thinwire runs`: what was run, followed, shown, compared and taken."""
