"""Every method of the field in a file of its own: quantizers, sparsifiers, rotations, low rank."""
