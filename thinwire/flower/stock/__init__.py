"""Stock Flower beside us: a SuperLink of its own, in which there is no device and no run of ours."""
