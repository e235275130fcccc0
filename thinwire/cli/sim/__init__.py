"""`thinwire sim`: a plan's runs in this process."""
