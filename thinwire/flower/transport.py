"""FlowerLink: a device's end. It needs neither flwr nor torch: the standard library's HTTP and a key.

One connection waits for asks, the other one pushes. Whoever uses it decides when to try again: a call that cannot be
made raises `Unreachable` at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from cryptography.hazmat.primitives.asymmetric import ec

from thinwire.core.errors import BadPayload, Refused, Unreachable
from thinwire.core.fleet import Delivery, Hello, Welcome
from thinwire.core.home import disk_error, private_folder
from thinwire.core.messages import MAX_HEAD_BYTES, ask_from_bytes, reply_to_bytes
from thinwire.core.types import Ask, Failure, Part, ReplyHead
from thinwire.flower import hellos
from thinwire.flower.connection import Connection, in_words
from thinwire.flower.framing import LENGTH, STREAM_BYTES, inflated
from thinwire.flower.refusals import Refusal
from thinwire.flower.routes import HELLO, PULL, PUSH
from thinwire.flower.signing import Signer

REMEMBERED = 1024  # withdrawn asks


class FlowerLink:
    """The device `name`'s connections to the aggregator at `url`; downloads go to `folder`/downloads.

    It tells the aggregator which asks it holds: one is given again until it arrived whole, and not after. After the
    aggregator was restarted it says hello again by itself.
    """

    def __init__(self, url: str, key: ec.EllipticCurvePrivateKey, name: str, folder: Path) -> None:
        self.url, self.name = url, name
        signer = Signer(key)
        self._pulling, self._pushing = Connection(url, signer), Connection(url, signer)
        self._downloads = private_folder(folder / "downloads")
        for left in self._downloads.iterdir():
            left.unlink()  # of a process that was killed: what it held is given again
        self._hello: Hello | None = None
        self._lock = threading.Lock()
        self._held: dict[str, None] = {}
        self._cancelled: OrderedDict[str, None] = OrderedDict()

    def hello(self, hello: Hello) -> Welcome:
        if hello.name != self.name:
            raise Refused(f"this link is {self.name!r}'s", why=f"the hello says {hello.name!r}")
        with self._lock:
            if self._hello is not None and self._hello.process != hello.process:
                self._held.clear()
        with in_words(self.url):
            welcome = self._say(hello)
        self._hello = hello
        return welcome

    def pull(self, wait_s: float) -> Delivery | None:
        with in_words(self.url):
            try:
                return self._pull(wait_s)
            except Refusal as refusal:
                if refusal.kind != "hello":
                    raise
            self._say(self._said())  # the aggregator was restarted, or had given us up
            return self._pull(wait_s)

    def push(self, reply: ReplyHead | Failure, bundle: Path | None = None) -> None:
        head = reply_to_bytes(reply)
        length = sum(part.length for part in reply.parts) if isinstance(reply, ReplyHead) else 0
        _require(bundle, length)
        with in_words(self.url), self._pushing.post(PUSH, head, bundle, length) as answer:
            answer.read()
        with self._lock:
            self._held.pop(reply.ask_id, None)

    def cancelled(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._cancelled)

    def close(self) -> None:
        """From any thread: a pull or push in progress ends with `Unreachable`."""
        self._pulling.close()
        self._pushing.close()

    def _said(self) -> Hello:
        if self._hello is None:
            raise Unreachable("this link has not said hello yet", why="a hello comes before a pull")
        return self._hello

    def _say(self, hello: Hello) -> Welcome:
        with self._pulling.post(HELLO, hellos.to_bytes(hello)) as answer:
            return hellos.welcome_from_bytes(_block(answer, MAX_HEAD_BYTES))

    def _pull(self, wait_s: float) -> Delivery | None:
        with self._lock:
            held = list(self._held)
        wanted = json.dumps({"process": self._said().process, "wait_s": wait_s, "held": held}, separators=(",", ":"))
        with self._pulling.post(PULL, wanted.encode(), wait_s=wait_s) as answer:
            self._withdraw(_control(_block(answer, MAX_HEAD_BYTES)))
            began = time.monotonic()
            data = _block(answer, MAX_HEAD_BYTES)
            if not data:
                answer.read()
                return None
            ask = ask_from_bytes(data)
            bundle = self._download(answer, ask) if any(part.length for part in ask.parts) else None
            answer.read()
        with self._lock:
            self._held[ask.ask_id] = None
            self._cancelled.pop(ask.ask_id, None)
        return Delivery(ask, bundle, time.monotonic() - began)

    def _withdraw(self, ask_ids: Iterable[str]) -> None:
        with self._lock:
            for ask_id in ask_ids:
                self._held.pop(ask_id, None)
                self._cancelled[ask_id] = None
            while len(self._cancelled) > REMEMBERED:
                self._cancelled.popitem(last=False)

    def _download(self, answer: http.client.HTTPResponse, ask: Ask) -> Path:
        path = self._downloads / hashlib.sha256(ask.ask_id.encode()).hexdigest()[:32]
        try:
            with open(path, "wb", buffering=0) as file:
                for part in ask.parts:
                    _copy(answer, file, part)
        except BaseException as error:
            with contextlib.suppress(OSError):
                path.unlink()
            if isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError)):
                raise disk_error(error, path) from error
            raise
        return path


def _copy(answer: http.client.HTTPResponse, file: BinaryIO, part: Part) -> None:
    """One part from the wire to the file; what does not fit its digest was damaged on the way."""
    digest, left = hashlib.sha256(), part.length
    while left:
        data = answer.read(min(STREAM_BYTES, left))
        if not data:
            raise http.client.IncompleteRead(b"", left)
        digest.update(data)
        file.write(data)
        left -= len(data)
    if digest.hexdigest() != part.sha256:
        raise Unreachable(f"part {part.name!r} of an ask arrived damaged", why="it does not fit its digest")


def _block(answer: http.client.HTTPResponse, most: int) -> bytes:
    (length,) = LENGTH.unpack(_exactly(answer, LENGTH.size))
    if length > most:
        raise BadPayload(f"a block of {length} bytes", why=f"at most {most} are read")
    return inflated(_exactly(answer, length), most) if length else b""


def _exactly(answer: http.client.HTTPResponse, count: int) -> bytes:
    data = answer.read(count)
    if len(data) != count:
        raise http.client.IncompleteRead(data, count - len(data))
    return data


def _control(data: bytes) -> list[str]:
    try:
        return [str(ask_id) for ask_id in json.loads(data).get("cancelled", ())]
    except (ValueError, AttributeError, TypeError) as error:
        raise BadPayload("cannot read what the aggregator says", why=str(error)) from error


def _require(bundle: Path | None, length: int) -> None:
    """The parts must be there before anything is sent."""
    there = bundle.stat().st_size if bundle is not None else 0
    if there != length:
        raise BadPayload(f"the answer's parts have {there} bytes", why=f"its head announces {length}")
