"""What is done about devices whose data differ: SCAFFOLD and FedDyn, a short file each over one protocol."""

from thinwire.aggregation.algorithms.algorithm import Algorithm, algorithm_of, algorithms, carried, followed

__all__ = ["Algorithm", "algorithm_of", "algorithms", "carried", "followed"]
