"""How many bytes pass each TCP connection, and whose they are once their sender is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADERS_BYTES = 64 * 2**10  # of a request line and its headers: ours have less than 1 KiB


@dataclass
class Account:
    """Bytes and requests of one device, over all of its connections. Touched by the door's loop alone."""

    sent_bytes: int = 0
    received_bytes: int = 0
    requests: int = 0

    def __sub__(self, other: Account) -> Account:
        return Account(
            self.sent_bytes - other.sent_bytes,
            self.received_bytes - other.received_bytes,
            self.requests - other.requests,
        )

    def copy(self) -> Account:
        return Account(self.sent_bytes, self.received_bytes, self.requests)


@dataclass
class Wire:
    """One connection. What passed before its device was known is charged to the device then."""

    account: Account = field(default_factory=Account)
    open: bool = True
    on_close: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None

    def belongs_to(self, account: Account) -> None:
        if account is not self.account:
            account.sent_bytes += self.account.sent_bytes
            account.received_bytes += self.account.received_bytes
            self.account = account


class CountedTransport:
    """A transport that counts what is written; everything else is the transport's own."""

    def __init__(self, transport: asyncio.Transport, wire: Wire) -> None:
        self._transport, self._wire = transport, wire

    def write(self, data: bytes) -> None:
        self._wire.account.sent_bytes += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class WireProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a `Wire`, which an app finds in its scope (`wire_of`)."""

    _in_head, _head_bytes = False, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        self.wire = Wire(close=transport.close)
        super().connection_made(CountedTransport(transport, self.wire))  # type: ignore[arg-type]  # it acts as one

    def data_received(self, data: bytes) -> None:
        self.wire.account.received_bytes += len(data)
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEADERS_BYTES:
            self.wire.close()  # the parser itself would take headers without end

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.wire.open = False
        self.wire.on_close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self.scope["extensions"] = {"thinwire.wire": {"wire": self.wire}}


def wire_of(scope: Any) -> Wire:
    wire: Wire = scope["extensions"]["thinwire.wire"]["wire"]
    return wire
