"""What both ends of the wire say alike: requests and their signatures, paths, bodies, refusals, certificates."""
