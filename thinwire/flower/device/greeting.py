"""The first words of a link: what a device says of itself and of its line, and what it keeps of the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from thinwire.core.fleet import Hello, Welcome
from thinwire.flower.device.call import Call, block_of, finish
from thinwire.flower.device.clockwork import Clockwork
from thinwire.flower.device.connection import Connection
from thinwire.flower.device.trust import Trust
from thinwire.flower.wire import hellos
from thinwire.flower.wire.framing import packed
from thinwire.flower.wire.routes import HELLO

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
        with connection.made(Call("POST", HELLO, packed(hellos.to_bytes(said)), whole_key=True)) as answer:
            welcome = hellos.welcome_from_bytes(block_of(answer, hellos.MAX_WELCOME_BYTES))
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
