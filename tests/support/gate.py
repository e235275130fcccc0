"""A proxy that lets answers in one by one: in the order of rounds and devices, each after the one before is journalled.

So the order of accepted heads, on which a run's bits depend, is the same however often something died meanwhile. An
answer that comes late stands before those of later rounds. All else (hellos, pulls, failures, evaluations) passes at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.support import passing
from tests.support.journal import Journal
from tests.support.passing import MAX_HEADER, Answer, Upload

LOOK_S = 0.005  # between two looks into the journal
SEED = 20261122  # of where in an upload "uploading" is

Watch = Callable[[str, Answer], None]  # (moment, answer); moments: uploading, arriving, given, answered


class Gate:
    """Listens on a free port of loopback, for the device API at `target`. `watch` is told of each answer's moments, in
    the gate's thread: half of its bytes are given to the aggregator; all of them are; it has said that it has them. Of
    a large answer, whose parts travel apart: a drawn share of a part's bytes is given (`uploading`). A `patient` one
    keeps a connection until somebody listens at the target, else a device finds that nobody does.

    `not_before`: answers that are approved once a later round is open, as in a run in which they came late.
    """

    def __init__(
        self, target: str, devices: Sequence[str], journal: Journal, watch: Watch, patient: bool = True,
        not_before: Mapping[Answer, int] | None = None,
    ) -> None:  # fmt: skip
        host, _, port = target.rpartition(":")
        self.patient, self.not_before = patient, dict(not_before or {})
        self.target, self.devices, self.journal, self.watch = (host, int(port)), tuple(devices), journal, watch
        self.uploads: list[Upload] = []
        self._hold_from: float = math.inf  # the first round whose answers are not approved
        self._draw = random.Random(SEED)
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._there = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="gate", daemon=True)
        self._thread.start()
        self._there.wait()

    def shut(self, on: bool) -> None:
        """Let no answer in, until it is opened again; all else goes on."""
        self.hold_from(0 if on else math.inf)

    def hold_from(self, number: float) -> None:
        """Let only answers to earlier rounds' assignments in."""
        self._hold_from = number

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
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0, limit=MAX_HEADER)
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
            far_writer.transport.set_write_buffer_limits(high=0)  # what was drained is given, whatever ends it then
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
                return await asyncio.open_connection(*self.target, limit=MAX_HEADER)
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
        header = await passing.unless_closed(reader.readuntil(b"\r\n\r\n"), far_reader)
        body = await reader.readexactly(passing.length(header))
        answer = passing.update(header, body)
        if answer is not None:
            await passing.unless_closed(self._turn(answer), reader)
            half = len(body) // 2
            await self._give(far_writer, header + body[:half], "arriving", answer)
            await self._give(far_writer, body[half:], "given", answer)
            said = await passing.whole(far_reader)
            self.watch("answered", answer)
        elif passing.is_part(header):
            await self._upload(header, body, far_writer)
            said = await passing.whole(far_reader)
        else:
            far_writer.write(header + body)
            await far_writer.drain()
            said = await passing.unless_closed(passing.whole(far_reader), reader)
        writer.write(said)
        await writer.drain()

    async def _upload(self, header: bytes, body: bytes, far_writer: asyncio.StreamWriter) -> None:
        """Of the answer whose header was approved last: the next one's comes after it is journalled."""
        upload = Upload(self._last, passing.offset(header), len(body), int(self._draw.random() * len(body)))
        self.uploads.append(upload)
        await self._give(far_writer, header + body[: upload.given], "uploading", upload.answer)
        far_writer.write(body[upload.given :])
        await far_writer.drain()
        upload.given = upload.of

    async def _give(self, far_writer: asyncio.StreamWriter, data: bytes, moment: str, answer: Answer) -> None:
        far_writer.write(data)
        await far_writer.drain()
        self.watch(moment, answer)

    async def _turn(self, answer: Answer) -> None:
        """Until the gate and its round are open, and those before it, also of earlier rounds, are journalled."""
        opens = self.not_before.get(answer, answer.round)

        def may() -> bool:
            return (
                answer.round < self._hold_from
                and self.journal.has("RoundOpened", opens)
                and not any(self._place(one) < self._place(answer) for one in self.journal.outstanding())
            )

        while not may():  # noqa: ASYNC110  # another process's journal rings no bell
            await asyncio.sleep(LOOK_S)
        self._last = answer

    def _place(self, answer: Answer) -> tuple[int, int]:
        return answer.round, self.devices.index(answer.device)


@contextlib.contextmanager
def gate(
    target: str, devices: Sequence[str], journal: Journal, watch: Watch = lambda *_: None, *, patient: bool = True,
    not_before: Mapping[Answer, int] | None = None,
) -> Iterator[Gate]:  # fmt: skip
    made = Gate(target, devices, journal, watch, patient, not_before)
    try:
        yield made
    finally:
        made.close()
