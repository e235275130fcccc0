"""A TCP proxy that makes a line as bad as wanted: slow, far, lossy, cut after so many bytes, silent, or behind CONNECT.

It knows nothing of what it carries, and counts bytes in both directions.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

PIECE_BYTES = 4096
QUEUED_PIECES = 32  # 128 KiB on the way: more than 1 Mb/s times 200 ms
RETRANSMIT_S = 0.2  # Linux's least time-out (TCP_RTO_MIN), beyond a round trip
SEED = 20261122  # of what is lost
KERNEL_BYTES = 65_536  # of the sockets: else megabytes would be "sent" that no one has


@dataclass
class Way:
    """One direction. `cuts` are totals of bytes given, over all connections: the connection ends right there."""

    cuts: list[int] = field(default_factory=list)
    taken: int = 0
    given: int = 0
    lost: int = 0

    def most(self, wanted: int) -> int:
        """How much may go before the next cut."""
        return min(wanted, self.cuts[0] - self.given) if self.cuts else wanted


class Proxy:
    """Listens on a free port of loopback and carries to `target`; every setting can be changed at any time.

    `up` is towards the target. `tunnel`: a client first says CONNECT, which is kept in `assigned`. `loss`: the share of
    pieces that are lost once, drawn by a seed. Over TCP no byte is missing for that: the piece comes after a round trip
    and `RETRANSMIT_S`, and what was sent after it comes with it, in a burst.
    """

    def __init__(
        self,
        target: str,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float = 0.0,
        loss: float = 0.0,
        cuts_up: Sequence[int] = (),
        cuts_down: Sequence[int] = (),
        tunnel: bool = False,
    ) -> None:
        self.target = (target.rpartition(":")[0].strip("[]"), int(target.rpartition(":")[2]))
        self.latency_s, self.bytes_per_s, self.loss, self.tunnel = latency_s, bytes_per_s, loss, tunnel
        self.up, self.down = Way(sorted(cuts_up)), Way(sorted(cuts_down))
        self.connections, self.cut_count = 0, 0
        self.selected: list[str] = []
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        for side in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._listening.setsockopt(socket.SOL_SOCKET, side, KERNEL_BYTES)
        host, port = self._listening.getsockname()
        self.address = f"{host}:{port}"
        self._up_and_running = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="proxy", daemon=True)
        self._thread.start()
        self._up_and_running.wait()

    def cut(self) -> None:
        """End every connection now."""
        self._loop.call_soon_threadsafe(self._cut)

    def silence(self, on: bool) -> None:
        """Carry nothing more, in either direction, and say nothing about it."""
        self._loop.call_soon_threadsafe(self._flows.clear if on else self._flows.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._ending, self._flows = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._flows.set()
        server = await asyncio.start_server(self._carry, sock=self._listening)
        self._up_and_running.set()
        await self._ending.wait()
        server.close()
        self._cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task: Any = asyncio.current_task()
        self._tasks.add(task)
        self.connections += 1
        opened = {writer}
        self._open.add(writer)
        try:
            if self.tunnel:
                self.selected.append((await reader.readuntil(b"\r\n\r\n")).decode())
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            opened.add(far_writer)
            self._open.add(far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, far_writer, self.up, opened))
                both.create_task(self._pass(far_reader, writer, self.down, opened))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError, ExceptionGroup):
            pass
        finally:
            for one in opened:
                one.transport.abort()
            self._open -= opened
            self._tasks.discard(task)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way, opened: set[asyncio.StreamWriter]
    ) -> None:
        """Until the sender has ended. A piece is given `latency_s` after it was taken, at the line's rate, in order."""
        draw = random.Random(f"{SEED}/{self.connections}/{way is self.up}")
        queue: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(QUEUED_PIECES)

        async def take() -> None:
            end: bytes | None = b""
            try:
                while data := await reader.read(PIECE_BYTES):
                    way.taken += len(data)
                    lost = draw.random() < self.loss
                    way.lost += lost
                    late_s = RETRANSMIT_S + 2 * self.latency_s if lost else 0.0
                    await queue.put((self._loop.time() + self.latency_s + late_s, data))
            except OSError:
                end = None
            await queue.put((0.0, end))

        taking = asyncio.ensure_future(take())
        try:
            free_at = 0.0
            while True:
                due, data = await queue.get()
                await self._flows.wait()
                await asyncio.sleep(max(due, free_at) - self._loop.time())
                if data is None:
                    raise ConnectionAbortedError("the sender is gone")
                if not data:
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                    return
                data = data[: way.most(len(data))]
                writer.write(data)
                await writer.drain()
                way.given += len(data)
                if self.bytes_per_s:
                    free_at = max(free_at, self._loop.time()) + len(data) / self.bytes_per_s
                if way.cuts and way.given >= way.cuts[0]:
                    way.cuts.pop(0)
                    self.cut_count += 1
                    for one in opened:
                        one.close()  # what was written before still arrives
                    raise ConnectionAbortedError("cut")
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)


@contextlib.contextmanager
def proxy(target: str, **line: Any) -> Iterator[Proxy]:
    """One that ends with its block."""
    made = Proxy(target, **line)
    try:
        yield made
    finally:
        made.close()
