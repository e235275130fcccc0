"""The first words of a link: what a device says of itself and of its line, and what it keeps of the answer."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from thinwire.core.errors import BadPayload
from thinwire.core.fleet import Hello, Welcome
from thinwire.core.types import Ask, Failure, ReplyHead
from thinwire.transport.device.http_client import Call, Connection, block_of, finish
from thinwire.transport.device.identity import Clockwork, Trust
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, packed

SKEW_SHOWN_S = 5.0  # a clock that is right enough is not worth a word


class Greeting:
    """What the aggregator says about itself and about us is kept in `folder` for the next start.

    `spread_s`: within what time devices come back after they lost it together. It is known before the first hello too,
    for the power may have been away at the devices as well.
    """

    def __init__(self, name: str, folder: Path, trust: Trust | None, clock: Clockwork) -> None:
        self.name, self._folder, self._clock = name, folder, clock
        self.trust = trust
        self.names = {name}  # it goes by the one that it came with until its process ends, whatever the row's is
        self.spread_s = trust.spread_s if trust else 0.0
        self._first = True

    def say(self, hello: Hello, connection: Connection, pause: Callable[[], None]) -> Welcome:
        """Once, and again where the answer changed what there is to say: the CAs held, or how wrong the clock is."""
        if self._first and self.spread_s >= 1.0:
            pause()
        self._first = False
        said, welcome = self._say(hello, connection)
        if (said.holds, said.link["skew_s"]) != (self.holds, self.skew_s):
            _, welcome = self._say(hello, connection)
        return welcome

    @property
    def holds(self) -> tuple[str, ...]:
        """The pins of the CAs."""
        return self.trust.pins if self.trust else ()

    @property
    def skew_s(self) -> float:
        """As it is shown."""
        skew_s = self._clock.skew_s
        return float(round(skew_s)) if abs(skew_s) >= SKEW_SHOWN_S else 0.0

    def _say(self, hello: Hello, connection: Connection) -> tuple[Hello, Welcome]:
        rtt_s = round(connection.open(), 6)
        said = replace(hello, link={**hello.link, "rtt_s": rtt_s, "skew_s": self.skew_s}, holds=self.holds)
        with connection.made(Call("POST", HELLO, packed(registration.to_bytes(said)), whole_key=True)) as answer:
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


# Which asks a device holds and which were withdrawn: what one of its threads pulls, another one answers.
#
# Also which runs are the aggregator's that was greeted last: another one at the same address has runs of the same ids.


REMEMBERED = 1024  # withdrawn asks, and identities of runs


class Held:
    """Law: an ask is held from its whole arrival until it is answered or withdrawn; only others are given. Nobody
    answers a stop: it is held until a pull that names it is answered. No ask is held, and no reply is let out, of a run
    whose identity neither the last welcome nor an ask since has said; those without an identity are anybody's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, tuple[bool, str]] = {}  # ask_id -> whether it is a stop, and of which run
        self._runs: OrderedDict[str, None] = OrderedDict()  # identities
        self._greetings = 0
        self._withdrawn: OrderedDict[str, None] = OrderedDict()

    def now(self) -> list[str]:
        with self._lock:
            return list(self._held)

    def withdrawn(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._withdrawn)

    @property
    def greetings(self) -> int:
        """How many welcomes there were."""
        return self._greetings

    def greeted(self, identities: Iterable[str]) -> None:
        """An aggregator said which runs go on there: asks of others are withdrawn, nobody waits for their answers."""
        with self._lock:
            self._greetings += 1
            self._runs = OrderedDict.fromkeys(("", *identities))
            self._withdraw([ask_id for ask_id, (_, identity) in self._held.items() if identity not in self._runs])

    def is_of(self, reply: ReplyHead | Failure) -> bool:
        """Whether the reply is to a run of the aggregator that was greeted last."""
        with self._lock:
            return not self._greetings or reply.identity in self._runs

    def arrived(self, ask: Ask, greetings: int) -> None:
        """Hold an ask, also one that was withdrawn before: it was sent anew. `greetings`: when it was asked for."""
        with self._lock:
            if greetings == self._greetings:
                self._runs[ask.identity] = None
                if len(self._runs) > REMEMBERED:
                    self._runs.popitem(last=False)
            self._held[ask.ask_id] = ask.kind == "stop", ask.identity
            self._withdrawn.pop(ask.ask_id, None)
            if ask.identity not in self._runs:  # somebody else was greeted while it was on its way
                self._withdraw([ask.ask_id])

    def answered(self, ask_id: str) -> None:
        with self._lock:
            self._held.pop(ask_id, None)

    def said(self, ask_ids: Sequence[str]) -> None:
        """A pull that named these was answered: the aggregator knows of the stops among them."""
        with self._lock:
            for ask_id in [one for one in ask_ids if self._held.get(one, (False, ""))[0]]:
                del self._held[ask_id]

    def forget(self) -> None:
        """Another process begins: everything is given to it again."""
        with self._lock:
            self._held.clear()

    def withdraw(self, control: bytes) -> None:
        """What the aggregator says beside an ask; `BadPayload` when it cannot be read."""
        try:
            ask_ids = [str(ask_id) for ask_id in json.loads(control).get("cancelled", ())]
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise BadPayload("cannot read what the aggregator says", why=str(error)) from error
        with self._lock:
            self._withdraw(ask_ids)

    def _withdraw(self, ask_ids: Iterable[str]) -> None:
        for ask_id in ask_ids:
            if self._held.pop(ask_id, None) is not None:  # of others an aggregator has nothing to say
                self._withdrawn[ask_id] = None
        while len(self._withdrawn) > REMEMBERED:
            self._withdrawn.popitem(last=False)
