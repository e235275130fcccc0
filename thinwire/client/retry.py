"""When the aggregator does not answer: how long to wait before the next try, and when to say so."""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from thinwire.core.errors import Refused, ThinwireError, Unreachable

FIRST_S, MOST_S = 0.5, 300.0
SAY_EVERY_S = 60.0


@dataclass
class Outage:
    """Waits with full jitter that grow with the outage: devices that lost an aggregator together do not come back
    together, and of a few none is late by more than half of what they missed anyway.

    A wait is drawn from 0 to half of what the outage has lasted, from half a second on up to five minutes: by the time,
    not by the number of tries, which two threads make; some 30 in ten minutes, and then one in two and a half. Where
    `within_s`, which the aggregator gave by the number of its devices, asks for more, it is drawn from 0 to that, and
    after the first try to twice that: a try in `within_s` on average, so that 10 000 come back at some 100 a second,
    whenever it is there again. Any thread may call it; all wait for one moment, or a device with two would come back at
    the sooner of two draws.
    """

    now: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random  # not a key's: no two devices may draw the same
    _since: float | None = None
    _said_at: float | None = None
    _next_at: float = -math.inf  # the moment of the next try
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def failed(self, after_s: float = 0.0, within_s: float = 0.0, since: float | None = None) -> tuple[float, bool]:
        """(seconds to wait, whether to say that nobody answers): at the first failure, then once a minute.

        `after_s`: the aggregator said not to come before; the draw comes on top, for it said so to others too.
        `since`: when this call failed first, where others may have gone through since.
        """
        with self._lock:
            now = self.now()
            first, self._since = self._since is None, now if self._since is None else self._since
            lasted_s = now - (self._since if since is None else min(since, self._since))
            spread_s = within_s if first and not lasted_s else 2 * within_s
            window_s = min(max(MOST_S, 2 * within_s), max(FIRST_S, lasted_s / 2, spread_s))
            if self._next_at <= now + after_s:
                self._next_at = now + after_s + self.draw() * window_s
            say = self._said_at is None or now - self._said_at >= SAY_EVERY_S
            self._said_at = now if say else self._said_at
            return self._next_at - now, say

    def worked(self) -> bool:
        """A call went through; True when the one before had not."""
        with self._lock:
            failed = self._since is not None
            self._since, self._said_at, self._next_at = None, None, -math.inf
            return failed

    @property
    def over(self) -> bool:
        """Whether the last call went through, whichever thread made it."""
        with self._lock:
            return self._since is None

    @property
    def lasts_s(self) -> float:
        with self._lock:
            return 0.0 if self._since is None else self.now() - self._since


# Calls to the aggregator that are made again until they go through.


T = TypeVar("T")
GIVE_UP_S = 60.0  # how long an outage may last with --once
LOOK_S = 0.5  # between two looks whether the other thread's call went through


class BrokenOff(Exception):
    """This program is about to end: the call was not made again."""


@dataclass
class Calls:
    """Both threads of a service call through one of these."""

    ending: threading.Event
    say: Callable[[str], None]
    give_up: bool = False
    outage: Outage = field(default_factory=Outage)

    def until_done(self, call: Callable[[], T], patience_s: float = GIVE_UP_S) -> T:
        """What the call gave. `Refused` at once; `Unreachable` only where giving up is allowed; `BrokenOff`."""
        since: float | None = None  # this call's first failure
        followed = False  # whether it was tried because another thread's had gone through
        while not self.ending.is_set():
            try:
                got = call()
            except Refused:
                raise
            except ThinwireError as error:  # unreachable, or this disk is full, or an ask cannot be read: try again
                if self.ending.is_set():
                    break
                since = self.outage.now() if since is None else since
                followed = self._wait(error, patience_s, since, not followed) or followed
                continue
            if self.outage.worked():
                self.say("connected again")
            return got
        raise BrokenOff

    def _wait(self, error: ThinwireError, patience_s: float, since: float, may_follow: bool) -> bool:
        """Until the next try is due, or (True) another thread's call went through where the aggregator gave no time.

        Once for a call: one that fails though others go through is tried at its own growing intervals. Once a minute it
        is said what, why and what to try.
        """
        away = isinstance(error, Unreachable)
        after_s, within_s = (error.after_s, error.within_s) if isinstance(error, Unreachable) else (0.0, 0.0)
        wait_s, due = self.outage.failed(after_s, within_s, since)
        if self.give_up and away and self.outage.lasts_s >= patience_s:
            raise error
        if due:
            self.say(f"{error}; trying again" + (f"\ntry:   {error.hint}" if error.hint else ""))
        until = self.outage.now() + wait_s
        while (left_s := until - self.outage.now()) > 0 and not self.ending.wait(min(LOOK_S, left_s)):
            if may_follow and not after_s and self.outage.over:
                return True
        return False


# What is done behind the training: one thread that finishes and sends answers, in the order they were begun in.


Job = Callable[[], object]
BACKGROUND_LOOK_S = 0.2  # how long an end may go unnoticed by who waits


class Behind:
    """Law: jobs run one after the other, in the order given; `failed` hears of the first error, and no job follows it.

    Two threads never send at once: who wants to send something itself waits with `drained` until nothing is left.
    """

    def __init__(self, failed: Callable[[Exception], None], ending: threading.Event) -> None:
        self._failed, self._ending = failed, ending
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._broken = False

    def put(self, job: Job) -> None:
        if self._thread is None:  # plans without overlap need none
            self._thread = threading.Thread(target=self._run, name="behind", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    @property
    def idle(self) -> bool:
        return self._jobs.unfinished_tasks == 0

    def drained(self) -> bool:
        """Wait until nothing is left; False when this program ends meanwhile."""
        with self._jobs.all_tasks_done:
            while self._jobs.unfinished_tasks and not self._ending.is_set():
                self._jobs.all_tasks_done.wait(BACKGROUND_LOOK_S)
        return self.idle

    def close(self, timeout_s: float) -> None:
        """After `ending` is set: what is being written is written, what was not begun stays undone."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not (self._broken or self._ending.is_set()):
                    job()
            except BrokenOff:
                pass
            except Exception as error:  # it ends the program, not this thread alone
                self._broken = True
                self._failed(error)
            finally:
                self._jobs.task_done()
        self._jobs.task_done()
