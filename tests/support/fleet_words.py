"""What tests say to a fleet and hear of it, at either end: hellos, assignments, answers, and waiting for them."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from thinwire.core.fleet import Delivery, Envelope, Fleet, Hello, Link, Roster, Spool
from thinwire.core.types import Assignment, Failure, Part, Reply, ReplyHeader, UpdateId

T = TypeVar("T")
PATIENCE_S = 60.0  # nothing here takes that long: it only ends a test that would hang


class Setting(Protocol):
    """What a fleet's factory yields."""

    @property
    def fleet(self) -> Fleet: ...
    @property
    def spool(self) -> Spool: ...
    @property
    def roster(self) -> Roster: ...
    def link(self, name: str) -> Link: ...


def hello(name: str, process: str = "") -> Hello:
    return Hello(name=name, process=process or uuid.uuid4().hex, versions={"thinwire": "test"})


def join(setting: Setting, name: str) -> Link:
    """A link that has said hello."""
    link = setting.link(name)
    link.hello(hello(name))
    return link


def body_parts(*bodies: bytes) -> tuple[Part, ...]:
    return tuple(
        Part(f"frame/{index}", len(body), hashlib.sha256(body).hexdigest()) for index, body in enumerate(bodies)
    )


def envelope(device: str, assignment_id: str, folder: Path | None = None, *bodies: bytes) -> Envelope:
    """An assignment, with the bodies as its parts when there are any."""
    assignment = Assignment(
        assignment_id, "digits-1", "digits", "train", {"run": {"task": "digits"}}, round=1, parts=body_parts(*bodies)
    )
    return Envelope(device, assignment, written(folder, *bodies) if folder and bodies else None)


def written(folder: Path, *bodies: bytes) -> Path:
    path = folder / f"bundle-{uuid.uuid4().hex}"
    path.write_bytes(b"".join(bodies))
    return path


def answer(device: str, assignment_id: str, sequence: int = 1, *bodies: bytes) -> ReplyHeader:
    return ReplyHeader(assignment_id, UpdateId("digits-1", device, sequence), 0, examples=32, steps=5, a=5.0, norm=1.5,
                     metrics={"loss": (3.5, 7.0)}, parts=body_parts(*bodies))  # fmt: skip


def until(true: Callable[[], object]) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def polled(fleet: Fleet, kind: type[T], where: Callable[[T], bool] = lambda arrival: True) -> T:
    """The next arrival of this kind; those before it are passed over, those after it stay for the next call."""
    end, left = time.monotonic() + PATIENCE_S, vars(fleet).setdefault("left_by_polled", [])
    while time.monotonic() < end:
        left += [] if left else fleet.poll(0.5)
        while left:
            arrival = left.pop(0)
            if isinstance(arrival, kind) and where(arrival):
                return arrival
    raise AssertionError(f"no {kind.__name__} came")


def answers_now(fleet: Fleet) -> list[Reply]:
    return [arrival for arrival in fleet.poll(0.2) if isinstance(arrival, (ReplyHeader, Failure))]


def pulled(link: Link) -> Delivery:
    """The next assignment on this link."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if (delivery := link.pull(1.0)) is not None:
            return delivery
    raise AssertionError("no assignment came")
