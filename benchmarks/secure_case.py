"""Measure one case of `benchmarks.secure_sum`, and the meter of process CPU and memory that both of its sides use."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from benchmarks.processes import status_bytes
from thinwire.core.types import Vector

WEIGHT, WEIGHT_MAX = 500, 1000  # of each client; Flower's default maximum
CORRUPT = DROPOUT = 0.3  # what the terms of our rounds withstand; the threshold that follows is Flower's too


@dataclass(frozen=True)
class Case:
    """Holds one secure round of `clients` clients and `params` parameters.

    `dropout` is the share of clients that are lost after they have sent their shares. What follows is of ours only.
    """

    clients: int
    params: int
    dropout: float = 0.0
    bits: int = 8
    support: float = 1.0
    rotate: int = 0
    post_quantum: bool = False

    @property
    def lost(self) -> int:
        """
        >>> Case(10, 1000, dropout=0.3).lost
        3
        """
        return int(self.clients * self.dropout + 1e-9)

    def vector(self) -> Vector:
        """The update of the client that is measured: normal values of norm 1 in expectation."""
        x: Vector = np.random.default_rng(1).standard_normal(self.params, np.float32)
        x *= np.float32(self.params**-0.5)
        return x


class Meter:
    """Process CPU (user and system, all threads) in its `with` blocks, and the most memory in them above that at
    `base`. What a block leaves on the heap is given back before `base` looks.
    """

    def __init__(self) -> None:
        self.cpu_s, self.peak_bytes, self._base, self._began = 0.0, 0, 0, 0.0

    def base(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._base = status_bytes(os.getpid(), "VmRSS")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again at VmRSS
        self._began = time.process_time()

    def stop(self) -> None:
        self.cpu_s += time.process_time() - self._began
        if self._base:
            self.peak_bytes = max(self.peak_bytes, status_bytes(os.getpid(), "VmHWM") - self._base)


def row_of(case: Case, keys: Meter, vector: Meter, server: Meter, uplink: int, threshold: int) -> dict[str, Any]:
    """Return the row of one side in a round: seconds of process CPU, bytes, and memory in models of float32."""
    model = 4 * case.params
    return {
        "client_cpu_s": keys.cpu_s + vector.cpu_s,
        "client_vector_cpu_s": vector.cpu_s,
        "server_cpu_s": server.cpu_s,
        "uplink_bytes": uplink,
        "client_peak_models": vector.peak_bytes / model,
        "server_peak_models": server.peak_bytes / model,
        "threshold": threshold,
    }
