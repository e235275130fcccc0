"""Aggregation: the weighted mean, reductions, server optimizers, control variates, the downlink, and lattice points."""

from thinwire.aggregation.downlink import Downlink, ModelReplica, digest, read_model, write_model
from thinwire.aggregation.lattice import BadSum, Lattice, LatticeTerms, Points
from thinwire.aggregation.mean import BufferMean, WeightedMean, counters, encode_buffers, float_buffers
from thinwire.aggregation.plan_codecs import codecs
from thinwire.aggregation.reduction_base import Combination, CoordinateWise, Reduction, UpdateRows
from thinwire.aggregation.reductions import reductions
from thinwire.aggregation.server_optimizers import ServerOptimizer, optimizers

__all__ = [
    "BadSum", "BufferMean", "Combination", "CoordinateWise", "Downlink", "Lattice", "LatticeTerms", "ModelReplica",
    "Points", "Reduction", "ServerOptimizer", "UpdateRows", "WeightedMean", "codecs", "counters", "digest",
    "encode_buffers", "float_buffers", "optimizers", "read_model", "reductions", "write_model",
]  # fmt: skip
