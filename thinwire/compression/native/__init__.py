"""Kernels in C++ beside the numpy that says what their bits are; which are used is decided once, at run time.

Every path gives the same bytes and floats. Without the library, numpy is the path: slower, and equal. `kernel(name)`
is the one door; what stands behind it releases the GIL.
"""

from thinwire.compression.native.library import available, chosen, kernel, using

__all__ = ["available", "chosen", "kernel", "using"]
