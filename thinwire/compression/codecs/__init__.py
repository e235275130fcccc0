"""The codecs: quantizers, sparsifiers, rotations and coders, one family a file."""
