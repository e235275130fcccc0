"""The device's side of a session with the aggregator: registration, and the assignments that are in flight.

`Registration` registers the process and keeps what the aggregator answered. `InFlightAssignments` knows which
assignments the device has and which were withdrawn, because one thread pulls them and another thread replies to them.
`InFlightAssignments` also knows which runs belong to the aggregator of the last registration: another aggregator at the
same address may have runs with the same ids.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from thinwire.core.errors import BadPayload
from thinwire.core.fleet import Hello, Welcome
from thinwire.core.types import Ask, Failure, ReplyHeader
from thinwire.transport.device.http_client import Connection, HttpRequest, block_of, finish
from thinwire.transport.device.identity import ServerClock, Trust
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, packed

SKEW_SHOWN_S = 5.0  # a smaller skew is reported as 0


class Registration:
    """Registers the client's process, and stores in `folder` what the aggregator answered, for the next start.

    `spread_s` is the time in seconds over which devices reconnect after all of them lost the aggregator. It is known
    before the first registration too, because a power cut may have hit the devices as well. `names` are all names that
    the aggregator gave this device since the process started, and the one that it started with.
    """

    def __init__(self, name: str, folder: Path, trust: Trust | None, clock: ServerClock) -> None:
        self.name, self._folder, self._clock = name, folder, clock
        self.trust = trust
        self.names = {name}  # the first name stays valid until the process ends, even if the device is renamed
        self.spread_s = trust.spread_s if trust else 0.0
        self._first = True

    def say(self, hello: Hello, connection: Connection, pause: Callable[[], None]) -> Welcome:
        """Register the process, and return the aggregator's answer.

        It registers a second time if the answer changed what the device reports: its CAs, or the skew of its clock.
        Before the first registration it calls `pause` if `spread_s` is at least one second.
        """
        if self._first and self.spread_s >= 1.0:
            pause()
        self._first = False
        said, welcome = self._say(hello, connection)
        if (said.holds, said.link["skew_s"]) != (self.holds, self.skew_s):
            _, welcome = self._say(hello, connection)
        return welcome

    @property
    def holds(self) -> tuple[str, ...]:
        """Return the pins of the CAs that the device trusts."""
        return self.trust.pins if self.trust else ()

    @property
    def skew_s(self) -> float:
        """Return the reported clock skew in whole seconds, 0 below `SKEW_SHOWN_S`."""
        skew_s = self._clock.skew_s
        return float(round(skew_s)) if abs(skew_s) >= SKEW_SHOWN_S else 0.0

    def _say(self, hello: Hello, connection: Connection) -> tuple[Hello, Welcome]:
        rtt_s = round(connection.open(), 6)
        said = replace(hello, link={**hello.link, "rtt_s": rtt_s, "skew_s": self.skew_s}, holds=self.holds)
        with connection.made(HttpRequest("POST", HELLO, packed(registration.to_bytes(said)), whole_key=True)) as answer:
            welcome = registration.welcome_from_bytes(block_of(answer, registration.MAX_WELCOME_BYTES))
            finish(answer)
        self._clock.learn(welcome.server_time)
        connection.require_dates()
        self._learn(welcome)
        return said, welcome

    def _learn(self, welcome: Welcome) -> None:
        self.name, self.spread_s = welcome.name, max(0.0, welcome.spread_s)
        self.names.add(welcome.name)
        if self.trust is not None:
            spread_s = float(round(self.spread_s))
            known = replace(self.trust.renewed(welcome.cas), name=welcome.name, spread_s=spread_s)
            if known != self.trust:
                known.save(self._folder)
                self.trust = known


REMEMBERED = 1024  # withdrawn assignments, and identities of runs


class InFlightAssignments:
    """The assignments in flight on a device, and the runs of the aggregator with which it registered last.

    Invariant: an assignment is in flight from its complete arrival until it is replied to or withdrawn, and the
    aggregator gives only others. A stop gets no reply: it is in flight until a pull that names it is answered.

    Invariant: no assignment is in flight, and no reply is sent, for a run whose identity is unknown. An identity is
    known from the last registration or from an assignment since then. An empty identity belongs to every aggregator.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, tuple[bool, str]] = {}  # assignment id -> is it a stop, and the identity of its run
        self._runs: OrderedDict[str, None] = OrderedDict()  # identities
        self._greetings = 0
        self._withdrawn: OrderedDict[str, None] = OrderedDict()

    def now(self) -> list[str]:
        """Return the ids of the assignments in flight."""
        with self._lock:
            return list(self._held)

    def withdrawn(self) -> frozenset[str]:
        """Return the ids of the assignments that were withdrawn."""
        with self._lock:
            return frozenset(self._withdrawn)

    @property
    def greetings(self) -> int:
        """Return how many times the device has registered."""
        return self._greetings

    def greeted(self, identities: Iterable[str]) -> None:
        """Record the runs that continue at the aggregator, and withdraw the assignments of all other runs.

        Nobody waits for replies to those.
        """
        with self._lock:
            self._greetings += 1
            self._runs = OrderedDict.fromkeys(("", *identities))
            self._withdraw([ask_id for ask_id, (_, identity) in self._held.items() if identity not in self._runs])

    def is_of(self, reply: ReplyHeader | Failure) -> bool:
        """Return True if the reply belongs to a run of the aggregator with which the device registered last."""
        with self._lock:
            return not self._greetings or reply.identity in self._runs

    def arrived(self, ask: Ask, greetings: int) -> None:
        """Record an assignment as in flight, also one that was withdrawn before and sent again.

        `greetings` is the count of registrations when the assignment was pulled.
        """
        with self._lock:
            if greetings == self._greetings:
                self._runs[ask.identity] = None
                if len(self._runs) > REMEMBERED:
                    self._runs.popitem(last=False)
            self._held[ask.ask_id] = ask.kind == "stop", ask.identity
            self._withdrawn.pop(ask.ask_id, None)
            if ask.identity not in self._runs:  # the device registered with another aggregator meanwhile
                self._withdraw([ask.ask_id])

    def answered(self, ask_id: str) -> None:
        """Remove an assignment that was replied to."""
        with self._lock:
            self._held.pop(ask_id, None)

    def said(self, ask_ids: Sequence[str]) -> None:
        """Remove the stops among the assignments that a pull named, because the aggregator answered that pull."""
        with self._lock:
            for ask_id in [one for one in ask_ids if self._held.get(one, (False, ""))[0]]:
                del self._held[ask_id]

    def forget(self) -> None:
        """Remove all assignments because another process begins, which receives them again."""
        with self._lock:
            self._held.clear()

    def withdraw(self, control: bytes) -> None:
        """Withdraw the assignments that the control message `control` names; raise `BadPayload` if it is unreadable."""
        try:
            ask_ids = [str(ask_id) for ask_id in json.loads(control).get("cancelled", ())]
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise BadPayload("cannot read what the aggregator says", why=str(error)) from error
        with self._lock:
            self._withdraw(ask_ids)

    def _withdraw(self, ask_ids: Iterable[str]) -> None:
        for ask_id in ask_ids:
            if self._held.pop(ask_id, None) is not None:  # an aggregator may withdraw only these
                self._withdrawn[ask_id] = None
        while len(self._withdrawn) > REMEMBERED:
            self._withdrawn.popitem(last=False)
