"""One whole life of a device, as its own code lives it: the session that a transcript holds.

It is lived twice: against a real device API when a transcript is written, and against a recorded device API when it is
read. What happens at the aggregator meanwhile has a name, so that a replay can let it happen at the same moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.fleet_words import body_parts, written
from tests.support.transport_doubles import Place
from thinwire.core.fleet import Delivery, Envelope, Hello, TaskReport, Welcome
from thinwire.core.types import Assignment, Failure, Part, ReplyHeader, Timings, UpdateId, UpdateOutcome, Work
from thinwire.transport.device.enroll import EnrollmentStatus, check_enrollment
from thinwire.transport.device.identity import ServerClock, Trust
from thinwire.transport.device.link import HttpsLink, LinkOptions
from thinwire.transport.protocol.http import INLINE_BYTES, etag

NAME, RUN = "pi-03", "digits-1"
SECRET = "5ec2e7" + "0" * 26
WAIT_S = 120.0
CUT_AT = 20_000  # of the first upload's bytes
HERE_ALREADY = 250_000  # of the model that is fetched a second time


def counted(length: int, label: str) -> bytes:
    """Bytes that say where they stand, and that git can store in little."""
    return "".join(f"{label}{at:>9}\n" for at in range(0, length, 10 + len(label))).encode()[:length]


INLINE = (counted(3_000, "a"), b"", counted(200, "b"))
LARGE = (counted(INLINE_BYTES, "c"), counted(1_000, "d"))
RESUMED = (counted(INLINE_BYTES + 10_000, "e"),)
ANSWER, LARGE_ANSWER = (counted(2_000, "f"), counted(100, "g")), (counted(INLINE_BYTES + 1, "h"),)

TASK = TaskReport("digits", "1.0", "5" * 64, "1" * 64, ("identity", "topk"))
HELLO = Hello(NAME, "0123456789abcdef", (TASK,), {"thinwire": "0.1.0", "python": "3.11.9"}, 1, 1, plans=("9" * 64,))


def _assign(number: int, parts: tuple[Part, ...]) -> Assignment:
    return Assignment(
        f"{RUN}.{number}.a", RUN, "digits", "train", {"run": {"task": "digits"}}, number, number - 1, "ba" * 32,
        "1" * 64, "topk(0.01) > int8 > zstd", Work(7, 32), 60.0, parts,
        outcomes=(UpdateOutcome(UpdateId(RUN, NAME, 1), "aggregated", 1),) if number > 1 else (), protocol=1,
    )  # fmt: skip


ASKS = {
    "send small": (_assign(1, body_parts(*INLINE)), INLINE),
    "send large": (replace(_assign(2, body_parts(*LARGE)), plan="9" * 64), LARGE),
    "send again": (_assign(3, body_parts(*RESUMED)), RESUMED),
    "send bare": (_assign(4, ()), ()),
}


def _reply(assignment_id: str, sequence: int, bodies: tuple[bytes, ...]) -> ReplyHeader:
    return ReplyHeader(
        assignment_id, UpdateId(RUN, NAME, sequence), 0, 96, 7, 6.5, 0.25, {"train/loss": (12.5, 96.0)},
        Timings(0.5, 0.0, 0.25, 4.0, 0.125), body_parts(*bodies), "topk(0.01) > int8 > zstd", {"seen": 3}, 0.75, 1,
    )  # fmt: skip


SMALL_REPLY, LARGE_REPLY = _reply(f"{RUN}.1.a", 1, ANSWER), _reply(f"{RUN}.2.a", 2, LARGE_ANSWER)
FAILURE = Failure("task-error", "ValueError at task.py:7", f"{RUN}.4.a", protocol=1)

Happen = Callable[[str], None]


def happening(here: Place, what: str) -> None:
    """What the aggregator does at this moment."""
    if what == "restart":
        here.restart()
    elif what == "withdraw":
        here.fleet.cancel([f"{RUN}.3.a"])
    else:
        wanted, bodies = ASKS[what]
        here.fleet.send([Envelope(NAME, wanted, written(here.folder, *bodies) if bodies else None)])


def clock_at(wall: float) -> ServerClock:
    """A device's clock that stands still."""
    return ServerClock(wall=lambda: wall, boot=lambda: 0.0)


@dataclass
class Device:
    """Where the device of the session calls, and by what it is known there."""

    url: str
    key: ec.EllipticCurvePrivateKey
    folder: Path
    trust: Trust | None
    wall: float

    def stands(self) -> EnrollmentStatus:
        return check_enrollment(self.url, self.trust, self.key)

    def link(self) -> HttpsLink:
        return HttpsLink(self.url, self.key, NAME, self.folder, self.trust, LinkOptions(clock=clock_at(self.wall)))


@dataclass(frozen=True)
class Lived:
    """What the device understood."""

    before: EnrollmentStatus
    welcome: Welcome
    deliveries: tuple[Delivery | None, ...]
    bodies: tuple[bytes, ...]
    withdrawn: frozenset[str]
    after: EnrollmentStatus


def lived(device: Device, happen: Happen) -> Lived:
    """All that a device says after it joined: hello, assignments and answers small and large, cut once each way,
    leave.
    """
    before = device.stands()
    link = device.link()
    try:
        welcome = link.hello(HELLO)
        got = list[Delivery | None]()

        def pulled(*happened: str) -> None:
            for what in happened:
                happen(what)
            got.append(link.pull(WAIT_S))

        pulled("send small")
        link.push(SMALL_REPLY, written(device.folder, *ANSWER))
        pulled("restart", "send large")
        link.push(LARGE_REPLY, written(device.folder, *LARGE_ANSWER))
        part = device.folder / "downloads" / etag(body_parts(*RESUMED)).strip('"')
        part.write_bytes(RESUMED[0][:HERE_ALREADY])
        pulled("send again")
        pulled("withdraw")
        withdrawn = link.cancelled()
        pulled("send bare")
        link.push(FAILURE)
        link.leave()
        bodies = tuple(each.bundle.read_bytes() for each in got if each and each.bundle)
        return Lived(before, welcome, tuple(got), bodies, withdrawn, device.stands())
    finally:
        link.close()
