"""Compression of updates: codecs, chains of stages, and error feedback."""

from thinwire.compression.base import BoundCodec, Codec, Contractive, Encoded, Everything, NoGuarantee, Unbiased
from thinwire.compression.feedback import feedback
from thinwire.compression.spec import parse, with_layers

__all__ = [
    "BoundCodec", "Codec", "Contractive", "Encoded", "Everything", "NoGuarantee", "Unbiased", "feedback", "parse",
    "with_layers",
]  # fmt: skip
