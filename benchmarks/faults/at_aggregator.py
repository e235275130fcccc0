"""Break things at the aggregator and on the way to it: how, what that has cost, how it is fixed, when it is back."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from subprocess import Popen

from tests.support.frozen import children, signal_all
from tests.support.gated_task import World
from tests.support.passing import Upload
from tests.support.small_disk import Disk

DATA_LOST = 8  # the exit code of a service that cannot write down what it decided


class CutUpload:
    """Every connection is cut while an upload is on its way: some of its bytes are at the aggregator, and not all."""

    cut: Upload

    def strike(self, world: World) -> None:
        world.way.cut()
        self.cut = world.way.uploads[-1]

    def goes_on(self, world: World) -> bool:
        """Return True if the device goes on with the bytes behind those that had arrived."""
        cut, uploads = self.cut, world.way.uploads
        if not 0 < cut.given < cut.of:
            return False
        at = next(place for place, one in enumerate(uploads) if one is cut)

        def again() -> list[Upload]:
            return [one for one in uploads[at + 1 :] if one.answer == cut.answer]

        world.way.hold_from(world.moment.round + 1)
        return world.seen(again, "the upload is gone on with") and again()[0].offset > cut.offset

    def arrived(self, world: World) -> Callable[[], bool]:
        answer = world.moment.answer
        return lambda: world.journal.has_answer(answer)


@dataclass
class KilledPage:
    """The dashboard's processes: children of the aggregator."""

    killed: set[int] = field(default_factory=set)

    def strike(self, world: World) -> None:
        self.killed = self._of(world)
        signal_all(signal.SIGKILL, self.killed)

    def gone(self, world: World) -> bool:
        return bool(self.killed)

    def new_one(self, world: World) -> Callable[[], bool]:
        return lambda: bool(self._of(world) - self.killed)

    def _of(self, world: World) -> set[int]:
        assert world.site.aggregator is not None
        return children(world.site.aggregator.pid)


@dataclass
class FullAggregator:
    """The aggregator's disk, which has room again once an answer was refused for it, or the service ended of it."""

    refused: int = 0

    def fill(self, world: World) -> None:
        self.refused = self._refusals(world)
        Disk(world.site.home / "aggregator").fill()

    def is_met(self, world: World) -> bool:
        world.way.shut(False)
        return world.seen(
            lambda: self._service(world).poll() is not None or self._refusals(world) > self.refused,
            "the aggregator has met its full disk",
        )

    def free(self, world: World) -> None:
        service = self._service(world)
        Disk(world.site.home / "aggregator").free()
        if service.poll() is not None:
            assert service.returncode == DATA_LOST, world.site.said()
            world.site.start_aggregator()

    def _service(self, world: World) -> Popen[bytes]:
        assert world.site.aggregator is not None
        return world.site.aggregator

    def _refusals(self, world: World) -> int:
        return sum(world.site.log_of(client).count("cannot write its state") for client in world.clients.values())
