"""FlowerLink: a device's end. It needs neither flwr nor torch: the standard library's HTTP and TLS, and a key.

One connection waits for asks, the other one pushes. Whoever uses it decides when to try again: a call that cannot be
made raises `Unreachable` at once, and says when and within what time to come again. Only a transfer that goes on, cut
by cut, is gone on with in here.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import quote

from cryptography.hazmat.primitives.asymmetric import ec

from thinwire.core.errors import BadPayload, NotOffered, NotWritten, Refused, Unreachable, UsageError
from thinwire.core.fleet import Delivery, Hello, Welcome
from thinwire.core.serialization import MAX_HEAD_BYTES, ask_from_bytes, reply_to_bytes
from thinwire.core.types import Ask, Failure, ReplyHead
from thinwire.transport.device.connect import Address, Line, moved
from thinwire.transport.device.errors import in_words
from thinwire.transport.device.http_client import LOOK_S, Call, Connection, Moved, block_of, finish
from thinwire.transport.device.identity import Clockwork, Trust
from thinwire.transport.device.session import Greeting, Held
from thinwire.transport.device.transfers import Incoming, Outgoing
from thinwire.transport.protocol.http import INLINE_BYTES, LEAVE, PULL, PUSH, Refusal, packed
from thinwire.transport.protocol.signing import Signer

MAX_CONTROL_BYTES = 64 * 2**10  # of what is said beside an assignment: some of the ids that the pull named
MAX_HELD = 64  # assignments: a run has one for each round of its overlap, at most 17
POLL_JITTER = 0.1  # of a pull's wait: devices that came together do not go on asking together


class FlowerLink:
    """The device `name`'s connections to the aggregator at `url`; downloads go to `folder`/downloads.

    `trust` is what `join` left; without it the door is a plain one on loopback. It is kept up to date in `folder`. The
    link tells the aggregator which asks it holds: one is given again until it arrived whole, and not after. After the
    aggregator was restarted it says hello again by itself. A large ask that is not wanted is delivered without its
    parts: it will be declined, and they would have come for nothing. One that this disk cannot take is delivered so
    too, with the error: nobody need wait for an answer to it. A reply leaves only for an aggregator that has its run
    (`Held`); where another process than before may answer, a hello asks for that. `min_free`: bytes of the disk that
    downloads leave free.
    """

    def __init__(
        self,
        url: str,
        key: ec.EllipticCurvePrivateKey,
        name: str,
        folder: Path,
        trust: Trust | None = None,
        *,
        clock: Clockwork | None = None,
        look_s: float = LOOK_S,
        is_moved: Callable[[Line], bool] = lambda line: moved(line.sock),
        is_wanted: Callable[[Ask], bool] = lambda ask: True,
        min_free: Callable[[], int] = lambda: 0,
    ) -> None:
        address = Address.parse(url)
        if address.tls != (trust is not None):
            raise UsageError(
                f"this device has {'not joined' if address.tls else 'joined another door than'} {url}",
                why="over TLS it must know whom to trust" if address.tls else "what it joined speaks TLS",
                hint="thinwire client join URL -" if address.tls else f"--aggregator {trust.url if trust else ''}",
            )
        self.url, self.clock = url, clock or Clockwork()
        self._greeting = Greeting(name, folder, trust, self.clock)
        self._is_wanted = is_wanted
        signer = Signer(key, self.clock.now)
        self.fingerprint = signer.fingerprint
        self._pulling, self._pushing = (
            Connection(address, signer, self.clock, lambda: self._greeting.trust, look_s=look_s, moved=is_moved)
            for _ in range(2)
        )
        self._incoming = Incoming(folder / "downloads", min_free)
        self._outgoing = Outgoing(self._pushing, self._pause)
        self._ending = threading.Event()
        self._hello: Hello | None = None
        self._one_hello = threading.Lock()  # two threads may say it, and the newest must be the last
        self._held = Held()

    def hello(self, hello: Hello) -> Welcome:
        if hello.name not in self._greeting.names:
            raise Refused(f"this link is {self._greeting.name!r}'s", why=f"the hello says {hello.name!r}")
        if self._hello is not None and self._hello.process != hello.process:
            self._held.forget()
        with self._in_words(), self._one_hello:
            free = self._pulling if self._hello is None else self._pushing  # a pull may be waiting on the other one
            welcome = self._greet(hello, free)
            self._hello = hello
        return welcome

    def pull(self, wait_s: float) -> Delivery | None:
        wait_s *= random.uniform(1 - POLL_JITTER, 1 + POLL_JITTER)
        with self._in_words():
            self._know_the_time(self._pulling)
            try:
                return self._pull(wait_s)
            except Moved:
                return self._pull(wait_s)
            except Refusal as refusal:
                if refusal.kind != "hello":
                    raise
            with self._one_hello:  # the aggregator was restarted, had given us up, or has news for everybody
                self._greet(self._said(), self._pulling)
            return self._pull(wait_s)

    def push(self, reply: ReplyHead | Failure, bundle: Path | None = None) -> None:
        head = reply_to_bytes(reply)
        length = reply.payload_bytes if isinstance(reply, ReplyHead) else 0
        _require(bundle, length)
        with self._in_words():
            self._know_the_time(self._pushing)
            self._know_the_aggregator()
        if not self._held.is_of(reply):
            raise self._not_offered(reply)
        with self._in_words(answer=True):
            if isinstance(reply, ReplyHead) and bundle is not None and length > INLINE_BYTES:
                self._outgoing.send(reply, head, bundle)
            else:
                body = packed(head) + (bundle.read_bytes() if bundle is not None and length else b"")
                self._call(self._pushing, Call("POST", PUSH, body))
        self._held.answered(reply.ask_id)

    def leave(self) -> None:
        """Shut this device out, by its own wish. The key is then of no use any more: whoever calls deletes it."""
        with self._in_words():
            self._call(self._pushing, Call("POST", LEAVE))

    def cancelled(self) -> frozenset[str]:
        return self._held.withdrawn()

    def close(self) -> None:
        """From any thread: a pull or push in progress ends with `Unreachable`."""
        self._ending.set()
        self._pulling.close()
        self._pushing.close()

    def _know_the_time(self, connection: Connection) -> None:
        """Say hello again where what was learned of the time was forgotten: no certificate is judged without it."""
        if self.clock.doubted:
            with self._one_hello:
                self._greet(self._said(), connection)

    def _know_the_aggregator(self) -> None:
        """Say hello again where no line is left to the process that heard the last one: who answers may be another."""
        if self._hello is not None and not (self._pushing.is_known() or self._pulling.is_known()):
            with self._one_hello:
                self._greet(self._said(), self._pushing)

    def _greet(self, hello: Hello, connection: Connection) -> Welcome:
        welcome = self._greeting.say(hello, connection, self._pause)
        self._held.greeted(welcome.runs.values())
        connection.known()
        return welcome

    def _not_offered(self, reply: ReplyHead | Failure) -> NotOffered:
        run = reply.update_id.run if isinstance(reply, ReplyHead) else reply.ask_id.partition(".")[0]
        return NotOffered(
            f"what was made for {run} is not sent to the aggregator at {self.url}",
            why="the run is over, or is another aggregator's: here none that goes on has its name and its identity",
            hint="it is kept on this device, until a new run has its name; thinwire client leave deletes it",
        )

    def _said(self) -> Hello:
        if self._hello is None:
            raise Unreachable("this link has not said hello yet", why="a hello comes before a pull")
        return self._hello

    def _pull(self, wait_s: float) -> Delivery | None:
        held, greetings = self._held.now(), self._held.greetings
        said = {"process": self._said().process, "wait_s": wait_s, "held": held}
        wanted = json.dumps(said, separators=(",", ":"))
        with self._pulling.made(Call("POST", PULL, packed(wanted.encode()), wait_s=wait_s)) as answer:
            self._held.withdraw(block_of(answer, MAX_CONTROL_BYTES))
            began = time.monotonic()
            data = block_of(answer, MAX_HEAD_BYTES)
            ask = ask_from_bytes(data) if data else None
            if ask and ask.ask_id not in held and len(held) >= MAX_HELD:
                raise Unreachable(
                    f"the aggregator sends more than {MAX_HELD} assignments at once",
                    why="each takes memory and disk until it is answered",
                )
            length = sum(part.length for part in ask.parts) if ask else 0
            bundle, error = None, None
            try:
                bundle = self._incoming.take(ask.parts, answer) if ask and 0 < length <= INLINE_BYTES else None
            except NotWritten as refused:
                error = refused
            finish(answer)
        self._pulling.known()  # only who heard its hello answers a pull
        self._held.said(held)
        if ask is None:
            return None
        try:
            if length > INLINE_BYTES and self._is_wanted(ask) and (bundle := self._fetched(ask)) is None:
                return None
        except NotWritten as refused:
            error = refused
        self._held.arrived(ask, greetings)
        return Delivery(ask, bundle, time.monotonic() - began, error, self._greeting.name, len(data))

    def _fetched(self, ask: Ask) -> Path | None:
        """A large ask's parts, whole; None when it was withdrawn meanwhile. As long as each try gains something."""

        @contextmanager
        def get(start: int, tag: str) -> Iterator[http.client.HTTPResponse]:
            ranged = {"range": f"bytes={start}-", "if-range": tag} if start else {}
            with self._pulling.made(
                Call("GET", f"/tw/v1/asks/{quote(ask.ask_id, safe='')}/bundle", headers=ranged)
            ) as answer:
                yield answer
                finish(answer)  # or this line would be dropped, and with it who is known to be at its other end

        while True:
            before = self._incoming.size(ask.parts)
            try:
                return self._incoming.fetch(ask.parts, get)
            except Refusal as refusal:
                if refusal.status != 404:
                    raise
                return None
            except Moved:
                continue
            except (OSError, http.client.HTTPException):
                if self._pulling.closed or self._incoming.size(ask.parts) <= before:
                    raise
            self._pause()

    def _call(self, connection: Connection, call: Call) -> None:
        """One small request, made again at once when this machine moved in the middle of it."""
        try:
            with connection.made(call) as answer:
                finish(answer)
        except Moved:
            with connection.made(call) as answer:
                finish(answer)

    def _pause(self) -> None:
        """Before a cut line is dialled again: the others may have lost it too."""
        self._ending.wait(random.uniform(0.0, self._greeting.spread_s))

    def _in_words(self, answer: bool = False) -> AbstractContextManager[None]:
        greeting, ended = self._greeting, self._ending.is_set
        return in_words(self.url, greeting.trust is not None, self.fingerprint, greeting.spread_s, ended, answer)


def _require(bundle: Path | None, length: int) -> None:
    """The parts must be there before anything is sent."""
    there = bundle.stat().st_size if bundle is not None else 0
    if there != length:
        raise BadPayload(f"the answer's parts have {there} bytes", why=f"its head announces {length}")
