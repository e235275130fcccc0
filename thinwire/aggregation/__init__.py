"""Making updates small, and putting them together again: codecs, feedback, the mean, server optimizers, model files."""

from thinwire.aggregation.book import codecs
from thinwire.aggregation.buffers import BufferMean, counters, encode_buffers, float_buffers
from thinwire.aggregation.codec import BoundCodec, Codec, Contractive, Encoded, Everything, ResidualOnly, Unbiased
from thinwire.aggregation.downlink import Downlink, Shadow
from thinwire.aggregation.feedback import feedback
from thinwire.aggregation.mean import WeightedMean
from thinwire.aggregation.model_file import digest, read_model, write_model
from thinwire.aggregation.optimizers import ServerOptimizer, optimizers
from thinwire.aggregation.parse import parse, with_layers

__all__ = [
    "BoundCodec", "BufferMean", "Codec", "Contractive", "Downlink", "Encoded", "Everything", "ResidualOnly",
    "ServerOptimizer", "Shadow", "Unbiased", "WeightedMean", "codecs", "counters", "digest", "encode_buffers",
    "feedback", "float_buffers", "optimizers", "parse", "read_model", "with_layers", "write_model",
]  # fmt: skip
