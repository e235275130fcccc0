"""A line of a given rate between a device and the aggregator: what a proxy on loopback can shape of it.

Each direction carries `bytes_per_s` over all connections together, as an access line does; there is no added latency.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket

PIECE_BYTES = 16_384
KERNEL_BYTES = 65_536  # of the sockets: else megabytes would be "sent" that nobody has


class Direction:
    """The pieces of all connections one after the other, at the line's rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.free_at = bytes_per_s, 0.0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(PIECE_BYTES):
            begins = max(self.free_at, loop.time())
            self.free_at = begins + len(data) / self.bytes_per_s
            await asyncio.sleep(max(0.0, self.free_at - loop.time()))
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()


async def serve(port: int, target: int, bytes_per_s: float) -> None:
    up, down = Direction(bytes_per_s), Direction(bytes_per_s)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        with contextlib.suppress(OSError):
            await asyncio.gather(up.carry(reader, far_writer), down.carry(far_reader, writer))
        for one in (writer, far_writer):
            one.transport.abort()

    listening = socket.create_server(("127.0.0.1", port))
    for side in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        listening.setsockopt(socket.SOL_SOCKET, side, KERNEL_BYTES)
    await (await asyncio.start_server(connected, sock=listening)).serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap.line")
    parser.add_argument("port", type=int)
    parser.add_argument("target", type=int)
    parser.add_argument("bytes_per_s", type=float)
    chosen = parser.parse_args()
    asyncio.run(serve(chosen.port, chosen.target, chosen.bytes_per_s))


if __name__ == "__main__":
    main()
