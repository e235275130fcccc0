"""Where a session has its task worked on: in this process (simulations), or in one of its own (`training/`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from thinwire.client.compute.clock import REAL, Clock
from thinwire.client.compute.order import Done, Order
from thinwire.client.compute.site import Site
from thinwire.client.compute.task import LoadedTask
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import Layout
from thinwire.core.types import Vector

if TYPE_CHECKING:
    from thinwire.client.compute import bench
    from thinwire.client.compute.order import Tell


class Bench(Protocol):
    """One task. `file` is its source, of which places in failures speak; `left_s` is what is left to the deadline."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def layout(self) -> Layout: ...

    def report(self) -> TaskReport: ...

    def do(
        self,
        order: Order,
        site: Site,
        params: Vector,
        buffers: Vector | None,
        tell: Tell,
        cancelled: Callable[[], bool],
        left_s: float | None = None,
    ) -> Done: ...


class Here:
    """In this process, where nothing can be taken back: whoever hangs, hangs it.

    Clients that take turns share one; `at` gives it to one of them with a clock of its own.
    """

    def __init__(self, task: LoadedTask, device: str = "cpu", clock: Clock = REAL, shared: Here | None = None) -> None:
        self.task, self.device, self.clock, self._shared = task, device, clock, shared

    def at(self, clock: Clock) -> Here:
        return Here(self.task, self.device, clock, self)

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def file(self) -> str:
        return self.task.file

    @cached_property
    def inner(self) -> bench.Bench:
        from thinwire.client.compute.bench import Bench as Inner

        if self._shared is not None:
            return self._shared.inner
        return Inner(self.task, self.device)

    @cached_property
    def layout(self) -> Layout:
        return Layout.from_json(self.inner.places.to_json())

    def report(self) -> TaskReport:
        from thinwire.client.task import report

        return report(self.task)

    def do(
        self,
        order: Order,
        site: Site,
        params: Vector,
        buffers: Vector | None,
        tell: Tell,
        cancelled: Callable[[], bool],
        left_s: float | None = None,
    ) -> Done:
        return self.inner.do(order, site, params, buffers, tell, cancelled, self.clock)
