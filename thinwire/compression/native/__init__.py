"""The native kernels in C++, each with a numpy oracle that defines its bits; the path is chosen once, at run time.

`kernel(name)` returns a kernel of the active path, which releases the GIL, or None if numpy is the path.

Invariant: every path gives the same bytes and floats. Without the library numpy does the work: slower, with equal
results.
"""

from thinwire.compression.native.library import available, chosen, kernel, using

__all__ = ["available", "chosen", "kernel", "using"]
