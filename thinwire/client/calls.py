"""Make the client's calls to the aggregator: retry them, send replies in the background, and record their success.

`ReconnectBackoff` draws the waits between tries (exponential backoff with full jitter), and `Retrier` repeats a call
after each wait. `BackgroundSender` is the thread that finishes and sends replies in order while the client trains.
`Handover` passes a message to a waiting thread. `StatusReporter` wraps the link, and writes `ClientStatus` after calls.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from thinwire.core.errors import NotAccepted, Refused, ThinwireError, Unreachable
from thinwire.core.fleet import Delivery, Hello, Link, Welcome
from thinwire.core.statedir import private_opener
from thinwire.core.types import Assignment, Failure, PhaseReply, Reply, ReplyHeader

T = TypeVar("T")
Say = Callable[[str], None]
MIN_WINDOW_S, MAX_WINDOW_S = 0.5, 300.0  # of the window from which a wait is drawn
SAY_EVERY_S = 60.0


@dataclass
class ReconnectBackoff:
    """The backoff of a client whose aggregator does not respond, with full jitter and waits that grow with the outage.

    Devices that lost an aggregator together do not reconnect together. In a small fleet none is late by more than half
    of what it missed anyway.

    - A wait is drawn from 0 to half of the outage so far. That window is at least half a second and at most five
      minutes. The time decides, not the number of tries, because two threads try. That makes some 30 tries in ten
      minutes, and then one in two and a half.
    - The aggregator may set a wider window `within_s`, by the number of its devices. The first wait is then drawn from
      0 to `within_s`, and later ones from 0 to twice that: one try per `within_s` on average. So 10 000 devices
      reconnect at some 100 a second, whenever the aggregator is back.

    Any thread may call it. All threads wait for one moment: a device with two draws would reconnect at the sooner one.
    """

    now: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random  # not drawn from a key: no two devices may draw the same
    _since: float | None = None
    _said_at: float | None = None
    _next_at: float = -math.inf  # the moment of the next try
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record_failure(
        self, after_s: float = 0.0, within_s: float = 0.0, since: float | None = None
    ) -> tuple[float, bool]:
        """Record a failure; return the seconds to wait, and True if the outage is to be printed.

        It is printed at the first failure, then once a minute. `after_s` is the time before which the aggregator wants
        no try; the draw is added to it, because other devices got the same time. `since` is when this call failed
        first, which is earlier than the outage if other calls succeeded since.
        """
        with self._lock:
            now = self.now()
            first, self._since = self._since is None, now if self._since is None else self._since
            lasted_s = now - (self._since if since is None else min(since, self._since))
            spread_s = within_s if first and not lasted_s else 2 * within_s
            window_s = min(max(MAX_WINDOW_S, 2 * within_s), max(MIN_WINDOW_S, lasted_s / 2, spread_s))
            if self._next_at <= now + after_s:
                self._next_at = now + after_s + self.draw() * window_s
            say = self._said_at is None or now - self._said_at >= SAY_EVERY_S
            self._said_at = now if say else self._said_at
            return self._next_at - now, say

    def record_success(self) -> bool:
        """Record that a call succeeded; return True if the one before had failed."""
        with self._lock:
            failed = self._since is not None
            self._since, self._said_at, self._next_at = None, None, -math.inf
            return failed

    @property
    def is_over(self) -> bool:
        """Return True if the last call of any thread succeeded."""
        with self._lock:
            return self._since is None

    @property
    def outage_s(self) -> float:
        """Return the seconds since the outage began, 0 without one."""
        with self._lock:
            return 0.0 if self._since is None else self.now() - self._since


GIVE_UP_S = 60.0  # longest outage with --once
OUTAGE_CHECK_S = 0.5  # between two checks if the other thread's call succeeded


class ShuttingDown(Exception):
    """The program is ending, so the call was not repeated."""


@dataclass
class Retrier:
    """The repeated calls of a client, shared by its threads; `ending` stops them, and `give_up` ends them in time."""

    ending: threading.Event
    say: Say
    give_up: bool = False
    outage: ReconnectBackoff = field(default_factory=ReconnectBackoff)

    def until_done(self, call: Callable[[], T], give_up_s: float = GIVE_UP_S) -> T:
        """Return what the call returned, after as many tries as it takes.

        Raises `Refused` at once, another error only if giving up is allowed and the outage lasts `give_up_s`, and
        `ShuttingDown` if the program is ending.
        """
        since: float | None = None  # this call's first failure
        has_followed = False  # True once a try was made because another thread's call succeeded
        while not self.ending.is_set():
            try:
                got = call()
            except Refused:
                raise
            except ThinwireError as error:  # unreachable, a full disk, or an unreadable assignment: try again
                if self.ending.is_set():
                    break
                since = self.outage.now() if since is None else since
                has_followed = self._wait(error, give_up_s, since, not has_followed) or has_followed
                continue
            if self.outage.record_success():
                self.say("connected again")
            return got
        raise ShuttingDown

    def _wait(self, error: ThinwireError, give_up_s: float, since: float, may_follow: bool) -> bool:
        """Wait until the next try is due, or return True early if another thread's call succeeded.

        It returns early once per call, and only if the aggregator gave no time. A call that fails although others
        succeed is tried at its own growing intervals. Once a minute the error is printed with its cause and hint.
        """
        after_s, within_s = (error.after_s, error.within_s) if isinstance(error, Unreachable) else (0.0, 0.0)
        wait_s, due = self.outage.record_failure(after_s, within_s, since)
        if self.give_up and self.outage.outage_s >= give_up_s:
            raise error
        if due:
            self.say(f"{error}; trying again" + (f"\ntry:   {error.hint}" if error.hint else ""))
        until = self.outage.now() + wait_s
        while (left_s := until - self.outage.now()) > 0 and not self.ending.wait(min(OUTAGE_CHECK_S, left_s)):
            if may_follow and not after_s and self.outage.is_over:
                return True
        return False


ENDING_CHECK_S = 0.2  # longest delay until a waiting thread notices that the program ends, as after a signal


class BackgroundSender:
    """The background thread of a client; one thread gives it jobs.

    Two threads never send at once: a thread that wants to send waits with `drained` until no job is left.

    Invariant: jobs run one after the other, in the order given. `failed` receives the first error, and no job follows
    it.
    """

    def __init__(self, failed: Callable[[Exception], None], ending: threading.Event) -> None:
        self._failed, self._ending = failed, ending
        self._thread = ThreadPoolExecutor(1, "background-sender")  # plans without overlap start none
        self._last: Future[None] | None = None
        self._broken = False

    def put(self, job: Callable[[], object]) -> None:
        """Add a job to the queue."""
        self._last = self._thread.submit(self._run, job)

    @property
    def idle(self) -> bool:
        """Return True if no job is waiting or running."""
        return self._last is None or self._last.done()

    def drained(self) -> bool:
        """Wait until no job is left; return False if the program ends before that."""
        while self._last is not None and not self.idle and not self._ending.is_set():
            wait([self._last], ENDING_CHECK_S)
        return self.idle

    def close(self) -> None:
        """End the thread after `ending` is set and the link is closed: only the job in progress is completed."""
        self._thread.shutdown(wait=True)

    def _run(self, job: Callable[[], object]) -> None:
        try:
            if not (self._broken or self._ending.is_set()):
                job()
        except ShuttingDown:
            pass
        except Exception as error:  # an internal error must end the program, not this thread alone
            self._broken = True
            self._failed(error)


class Handover:
    """A message that one thread makes and another one sends, if that thread still waits for it.

    Invariant: `take` returns each message for which `offer` returned True.
    """

    def __init__(self, ending: threading.Event) -> None:
        self._changed, self._ending = threading.Condition(), ending
        self._waits = False
        self._message: PhaseReply | None = None

    def begin(self) -> None:
        """Record that `take` follows."""
        with self._changed:
            self._waits = True

    def offer(self, message: PhaseReply) -> bool:
        """Give a message to the thread that waits; return False if none does."""
        with self._changed:
            if not self._waits:
                return False
            self._message = message
            self._end()
            return True

    def end(self) -> None:
        """Record that no message follows."""
        with self._changed:
            self._end()

    def _end(self) -> None:
        self._waits = False
        self._changed.notify_all()

    def take(self, within_s: float) -> PhaseReply | None:
        """Return the message, or None if `end` was called, the time is over or the program ends."""
        until = time.monotonic() + within_s
        with self._changed:
            while self._waits and (left_s := until - time.monotonic()) > 0 and not self._ending.is_set():
                self._changed.wait(min(ENDING_CHECK_S, left_s))
            self._waits = False
            message, self._message = self._message, None
            return message


def sent_line(assignment: Assignment, header: ReplyHeader, upload_s: float, duration_s: float) -> str:
    """Return the log line of a reply that was sent; after its deadline, with the stage that took longest, if known.

    `upload_s` includes all tries. `duration_s` counts from the start of the download.
    """
    line = f"round {assignment.round}: sent {header.payload_bytes:,} bytes{' under masks' if assignment.secure else ''}"
    if not assignment.deadline_s or duration_s <= assignment.deadline_s:
        return line
    named = {"download": "download_s", "queue": "queue_s", "measuring": "evaluate_s", "training": "train_s"}
    named |= {"loading": "load_s", "encoding": "encode_s", "saving": "commit_s"}
    spent = {name: getattr(header.timings, field) for name, field in named.items()}
    if not any(spent.values()):  # a protected reply has no times, so what took longest is not known here
        return f"{line}, {duration_s - assignment.deadline_s:.1f} s late"
    longest_s, what = max((upload_s, "upload"), *((seconds, name) for name, seconds in spent.items()))
    return f"{line}, {duration_s - assignment.deadline_s:.1f} s late: {what} took {longest_s:.1f} s"


STATUS_FILE = "status.json"


@dataclass(frozen=True)
class ClientStatus:
    """The status of a client.

    Times are this machine's, in seconds since 1970. `skew_s` is how far its clock is behind the aggregator's. In the
    state `offline`, the aggregator does not respond, or has the client come later. `last_error` has the reason, and
    stays when that is over.
    """

    state: Literal["connecting", "idle", "working", "offline"] = "connecting"
    at: float = 0.0
    connected_at: float | None = None  # since this time every call succeeded
    run: str = ""
    round: int = 0
    answered: int = 0  # since this process began
    last_error: str = ""
    last_error_at: float | None = None
    skew_s: float | None = None

    @classmethod
    def load(cls, folder: Path) -> ClientStatus | None:
        """Return the status that was written last, None if it is missing or unreadable.

        The process that wrote it may have ended.
        """
        try:
            said: dict[str, Any] = json.loads((folder / STATUS_FILE).read_bytes())
            return cls(**said)
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def save(self, folder: Path) -> None:
        """Replace the status file without a sync: it does not matter after a power cut, and cards wear out."""
        draft = folder / f".{STATUS_FILE}.new"
        with contextlib.suppress(OSError):  # a full disk must not end the service
            with open(draft, "w", encoding="utf-8", opener=private_opener) as file:
                json.dump(asdict(self), file)
            os.replace(draft, folder / STATUS_FILE)


class StatusReporter:
    """A `Link` that passes each call to `inside` and writes the status to `folder`. Any thread may call it."""

    def __init__(self, inside: Link, folder: Path, wall: Callable[[], float] = time.time) -> None:
        self._link, self._folder, self._wall = inside, folder, wall
        self._lock = threading.Lock()
        self._open: dict[str, tuple[str, int]] = {}  # assignment id -> run and round
        self._status, self._answered, self._is_closed = ClientStatus(), 0, False
        self._update()

    def hello(self, hello: Hello) -> Welcome:
        """Send the hello, and measure the clock's skew by the aggregator's time."""
        with self._record_call():
            welcome = self._link.hello(hello)
        if welcome.server_time:  # less than a round trip old, however long the hello waited before
            self._update(skew_s=round(welcome.server_time - self._wall(), 3))
        return welcome

    def pull(self, wait_s: float) -> Delivery | None:
        """Pull an assignment, and record its work as begun."""
        with self._record_call():
            return self._pulled(self._link.pull(wait_s))

    def push(self, reply: Reply, bundle: Path | None = None) -> None:
        """Push a reply, and record its assignment as done."""
        with self._record_call():
            try:
                self._link.push(reply, bundle)
            except NotAccepted:  # the work is done all the same
                self._replied(reply, 0)
                raise
            self._replied(reply)

    def answer(self, reply: PhaseReply | Failure, wait_s: float) -> Delivery | None:
        """Send a message of a phase, and pull as `pull` does."""
        with self._record_call():
            delivery = self._link.answer(reply, wait_s)
            self._replied(reply)
            return self._pulled(delivery)

    def cancelled(self) -> frozenset[str]:
        """Return the ids of withdrawn assignments."""
        return self._link.cancelled()

    def close(self) -> None:
        """Close the link inside; a call that this interrupts is no error."""
        self._is_closed = True
        self._link.close()

    def _pulled(self, delivery: Delivery | None) -> Delivery | None:
        """Record the work on an assignment as begun; a phase of a secure round is part of its training assignment."""
        if delivery is not None and delivery.assignment.kind not in ("stop", "secure"):
            with self._lock:
                self._open[delivery.assignment.assignment_id] = delivery.assignment.run, delivery.assignment.round
        return delivery

    def _replied(self, reply: Reply, answered: int = 1) -> None:
        if not isinstance(reply, PhaseReply):
            with self._lock:
                self._open.pop(reply.assignment_id, None)
                self._answered += answered

    @contextlib.contextmanager
    def _record_call(self) -> Iterator[None]:
        """Record one call: its error as the last one, its success as being connected."""
        try:
            yield
        except ThinwireError as error:
            if self._is_closed:
                raise
            self._update(connected_at=None, last_error=str(error), last_error_at=self._wall())
            raise
        self._update(connected_at=self._status.connected_at or self._wall())

    def _update(self, **changed: Any) -> None:
        with self._lock:
            for assignment_id in self._link.cancelled():
                self._open.pop(assignment_id, None)
            at = replace(self._status, at=self._wall(), answered=self._answered, **changed)
            if at.connected_at is None:
                at = replace(at, state="connecting" if at.last_error_at is None else "offline")
            elif self._open:
                run, number = next(reversed(self._open.values()))
                at = replace(at, state="working", run=run, round=number)
            else:
                at = replace(at, state="idle")
            self._status = at
            at.save(self._folder)
