"""`thinwire client`: a device put together, how it joins and leaves, what it is doing."""
