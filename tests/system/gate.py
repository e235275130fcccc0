"""A proxy that lets answers in one by one: in the order of rounds and devices, each after the one before is journalled.

So the order of accepted heads, on which a run's bits depend, is the same however often something died meanwhile. All
else (hellos, pulls, failures, evaluations) passes at once. It reads plain HTTP as our own clients speak it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.system.journal import Journal
from thinwire.flower.wire.framing import inflated, unblock
from thinwire.flower.wire.routes import PUSH

LOOK_S = 0.005  # between two looks into the journal
MOST_HEAD = 1 << 20


@dataclass(frozen=True)
class Answer:
    """A device's update to a round's ask."""

    round: int
    device: str


Watch = Callable[[str, Answer], None]  # (moment, answer); moments: arriving, given, answered


class Gate:
    """Listens on a free port of loopback, for the door at `target`. `watch` is told of each answer's moments, in the
    gate's thread: half of its bytes are given to the aggregator; all of them are; it has said that it has them. A
    `patient` one keeps a connection until somebody listens at the target, else a device finds that nobody does.
    """

    def __init__(
        self, target: str, devices: Sequence[str], journal: Journal, watch: Watch, patient: bool = True
    ) -> None:
        host, _, port = target.rpartition(":")
        self.patient = patient
        self.target, self.devices, self.journal, self.watch = (host, int(port)), tuple(devices), journal, watch
        self._shut = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._there = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="gate", daemon=True)
        self._thread.start()
        self._there.wait()

    def shut(self, on: bool) -> None:
        """Let no answer in, until it is opened again; all else goes on."""
        self._shut = on

    def cut(self) -> None:
        """End every connection now, from any thread; from `watch` before anything more is carried."""
        if threading.current_thread() is self._thread:
            self._cut()
        else:
            self._loop.call_soon_threadsafe(self._cut)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0, limit=MOST_HEAD)
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        self._there.set()
        await self._ending.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task: Any = asyncio.current_task()
        self._tasks.add(task)
        opened = [writer]
        try:
            far_reader, far_writer = await self._dialled()
            opened.append(far_writer)
            self._open |= set(opened)
            while True:
                await self._exchange(reader, writer, far_reader, far_writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            for one in opened:
                one.transport.abort()
            self._open -= set(opened)
            self._tasks.discard(task)

    def _cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _dialled(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_connection(*self.target, limit=MOST_HEAD)
            except ConnectionRefusedError:
                if not self.patient:
                    raise
                await asyncio.sleep(LOOK_S)

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        """One request and its answer; whoever ends its connection meanwhile ends both."""
        head = await _unless_closed(reader.readuntil(b"\r\n\r\n"), far_reader)
        body = await reader.readexactly(_length(head))
        answer = _update(head, body)
        if answer is None:
            far_writer.write(head + body)
            await far_writer.drain()
            writer.write(await _unless_closed(_whole(far_reader), reader))
        else:
            await self._turn(answer)
            half = len(body) // 2
            for moment, data in (("arriving", head + body[:half]), ("given", body[half:])):
                far_writer.write(data)
                await far_writer.drain()
                self.watch(moment, answer)
            said = await _whole(far_reader)
            self.watch("answered", answer)
            writer.write(said)
        await writer.drain()

    async def _turn(self, answer: Answer) -> None:
        """Until the gate is open and those before it in its round are journalled."""
        before = self.devices[: self.devices.index(answer.device)]

        def may() -> bool:
            return not self._shut and all(self.journal.has_answer(answer.round, device) for device in before)

        while not may():  # noqa: ASYNC110  # another process's journal rings no bell
            await asyncio.sleep(LOOK_S)


async def _unless_closed(wanted: Coroutine[Any, Any, bytes], other: asyncio.StreamReader) -> bytes:
    """What is wanted, unless the other side, which has nothing to say now, ends its connection first."""
    tasks = [asyncio.ensure_future(wanted), asyncio.ensure_future(other.read(1))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ConnectionAbortedError("the other side is gone")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _whole(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(_length(head))


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return int(value)
        assert name != b"transfer-encoding", "the lane knows how long its bodies are"
    return 0


def _update(head: bytes, body: bytes) -> Answer | None:
    """What a request brings, if that is a trained update: RUN.ROUND.DEVICE is the id of its ask."""
    if not head.startswith(f"POST {PUSH} ".encode()):
        return None
    said = json.loads(inflated(unblock(body)[0], MOST_HEAD))
    if not said.get("parts"):
        return None
    _, number, device = said["ask_id"].rsplit(".", 2)
    return Answer(int(number), device)


@contextlib.contextmanager
def gate(
    target: str, devices: Sequence[str], journal: Journal, watch: Watch = lambda *_: None, *, patient: bool = True
) -> Iterator[Gate]:
    made = Gate(target, devices, journal, watch, patient)
    try:
        yield made
    finally:
        made.close()
