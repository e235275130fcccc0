"""Readers of the dashboard's event streams, as one process.

    python -m benchmarks.event_readers HOST:PORT COUNT RUN ...

The first line of stdin is a JSON list of cookies. A reader has one of them and one of RUN, both in turn. It prints a
line when all readers have their stream, and reads until stdin ends; then it prints the delay of each event at each
reader, from the event's own time until it was read.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time


async def main(address: str, count: int, runs: list[str]) -> None:
    """Read until stdin ends."""
    loop = asyncio.get_running_loop()
    cookies = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    delays: list[float] = []
    ready = asyncio.Semaphore(0)
    paths = [f"/api/v1/runs/{run_id}/events/stream" for run_id in runs]
    turns = ((paths[number % len(paths)], cookies[number % len(cookies)]) for number in range(count))
    tasks = []
    for (
        path,
        cookie,
    ) in turns:  # one after the other: the dashboard closes the oldest of many that have not logged in yet
        tasks.append(asyncio.create_task(_read(address, path, cookie, delays, ready)))
        await ready.acquire()
    print(json.dumps({"readers": count}), flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    lost = sum(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps({"delays_s": [round(one, 4) for one in delays], "lost": lost}), flush=True)


async def _read(address: str, path: str, cookie: str, delays: list[float], ready: asyncio.Semaphore) -> None:
    """Follow one stream; an event that is over before the reader came has no delay to count."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    request = [f"GET {path} HTTP/1.1", f"Host: {address}", f"Cookie: {cookie}", "Accept: text/event-stream"]
    writer.write("\r\n".join([*request, "", ""]).encode())
    status = await reader.readline()
    began = time.time()
    ready.release()
    if b" 200 " not in status:
        raise ConnectionError(status.decode().strip())
    async for line in reader:
        if line.startswith(b"data: {") and (at := json.loads(line[6:]).get("at", 0.0)) > began:
            delays.append(time.time() - at)
    raise ConnectionError("the stream ended")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
