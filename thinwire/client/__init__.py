"""The program on a device: the task, its training, and exactly-once answers. Importing this imports no torch."""

from thinwire.client.partitions import held_out, own_part
from thinwire.client.site import Site, Split
from thinwire.client.task import LoadedTask, load_task

__all__ = ["LoadedTask", "Site", "Split", "held_out", "load_task", "own_part"]
