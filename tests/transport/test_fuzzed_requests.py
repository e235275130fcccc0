"""Strange requests by the thousand at a device API in a process of its own: it answers as its page says, or hangs up.

THINWIRE_FUZZ=50000 makes that many; the seed is THINWIRE_FUZZ_SEED.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.generate.device_api import KINDS
from tests.support.api_process import ApiProcess
from tests.support.callers import Caller, address_of
from tests.support.fuzzed_requests import Fuzz
from tests.transport.test_flood import MAX_MORE_BYTES, crowded
from thinwire.transport.device.identity import Trust

COUNT, SEED = int(os.environ.get("THINWIRE_FUZZ", "800")), int(os.environ.get("THINWIRE_FUZZ_SEED", "4"))
AT_ONCE = 12
SILENCE_S = 0.2  # a request that was cut short is waited for at the device API; we do not wait for its answer
BROKEN = {"503 internal", "503 disk"}
ALLOWED = {200, 206} | {int(kind[:3]) for kind in KINDS}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiProcess]:
    with crowded(tmp_path) as made:
        yield made


async def one_after_the_other(api: ApiProcess, fuzz: Fuzz, count: int, seen: Counter[str], source: str) -> None:
    """On a connection as long as that is kept open."""
    context, name = Trust("", api.authority.cas()).context(), api.authority.server_name()
    reader: asyncio.StreamReader | None = None
    for _ in range(count):
        request = fuzz.request()
        if reader is None:
            reader, writer = await asyncio.open_connection(
                *address_of(api), ssl=context, server_hostname=name, local_addr=(source, 0)
            )
        try:
            writer.write(request)
            async with asyncio.timeout(SILENCE_S):
                await writer.drain()
                said = await told(reader, request)
        except (TimeoutError, OSError, ssl.SSLError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            said = f"({'silence' if isinstance(error, TimeoutError) else 'hung up'})"
        seen[said] += 1
        if said.startswith("(") or reader.at_eof():
            writer.transport.abort()
            reader = None
    if reader is not None:
        writer.transport.abort()


async def told(reader: asyncio.StreamReader, request: bytes) -> str:
    """Status and kind of the next answer, read to its end."""
    header = await reader.readuntil(b"\r\n\r\n")
    status, lines = int(header[9:12]), header.lower().split(b"\r\n")
    length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
    body = b"" if request.startswith(b"HEAD") else await reader.readexactly(length)
    kind = str(json.loads(body)["error"]) if status >= 400 and body else ""
    return f"{status} {kind}".strip()


async def all_of(api: ApiProcess, callers: list[Caller], seen: Counter[str]) -> None:
    each = [Fuzz(callers, SEED * 1000 + nth) for nth in range(AT_ONCE)]
    async with asyncio.TaskGroup() as group:
        for nth, fuzz in enumerate(each):
            group.create_task(one_after_the_other(api, fuzz, COUNT // AT_ONCE, seen, f"127.55.0.{1 + nth}"))


def test_strange_requests_are_refused_by_the_table_and_cost_no_memory_and_no_round(
    api: ApiProcess, tmp_path: Path
) -> None:
    approved, leaving, stranger = (Caller(api, name, source="127.55.1.1") for name in ("pi-2", "pi-3", "pi-4"))
    for caller in (approved, leaving):
        assert caller.join(api.secrets.pop()).status == 200
        assert caller.hello().status == 200
    before, seen, rounds = api.memory(), Counter[str](), list[float]()

    async def meanwhile() -> None:
        fuzzing = asyncio.ensure_future(all_of(api, [approved, approved, stranger, leaving], seen))
        while not fuzzing.done():
            rounds.append(await asyncio.to_thread(api.round_s))
            await asyncio.wait([fuzzing], timeout=0.1)
        await fuzzing

    asyncio.run(meanwhile())
    answers = {said: count for said, count in seen.items() if not said.startswith("(")}
    print(dict(seen.most_common()), f"{len(rounds)} rounds", f"{(api.memory('VmHWM') - before) / 2**20:.1f} MiB more")
    assert {int(said[:3]) for said in answers} <= ALLOWED
    assert {said for said in answers if " " in said} <= set(KINDS) - BROKEN
    assert "Traceback" not in api.log.read_text()
    assert len(answers) > 10, "the requests are strange in many ways"
    assert sum(answers.values()) > COUNT / 3
    assert len(rounds) > 3
    assert api.memory("VmHWM") - before <= MAX_MORE_BYTES
    assert api.round_s() > 0, "rounds go on"
