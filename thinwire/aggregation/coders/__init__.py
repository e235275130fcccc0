"""Fewer bytes without loss: packed symbols, gaps of sorted indices, zstd where it helps.

Each coder decodes into a size that is known beforehand, so a hostile stream cannot make it allocate more.
"""
