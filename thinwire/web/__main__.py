"""`python -m thinwire.web --database URL --listen HOST:PORT`: serve the dashboard as a process of its own.

    --database URL      what Store.open takes: a SQLite file or a database's URL
    --listen HOST:PORT  an address of this machine's loopback; port 0 takes a free one
    --lock FILE         the aggregator's lock, to show when it is down; by default the one beside the database
    --log FILE          the file to which stderr goes: it is rotated, so that two files bound its size
    --standalone        the aggregator does not end this dashboard when it is stopped
    --cert, --key FILE  certificate and key: beyond loopback it listens with TLS only, and after there is an admin
    --name NAME         further name that the dashboard may be called; repeatable
    --proxy ADDR        address of the proxy whose forwarded headers count
    --parent PID        end when this process is no longer our parent

Beside the aggregator's lock it holds `dashboard.lock`, in which it writes its address: a state directory has one
dashboard. It does not need the aggregator: runs and devices stay readable while none is running.

It prints `ready HOST:PORT` on stdout when it listens, and nothing else. It ends with 0 on SIGINT and SIGTERM. If the
database or an argument is invalid, it ends with the exit code of that error, and if the port is in use, with 4.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import uvicorn

from thinwire import __version__
from thinwire.core.errors import ThinwireError, UsageError
from thinwire.core.log_file import MAX_LOG_BYTES, bounded_log
from thinwire.core.net import bind, host_port, is_loopback
from thinwire.core.statedir import DASHBOARD_LOCK, lock_file, write_about
from thinwire.store import Store
from thinwire.store.database import database_url
from thinwire.web.app import create_app
from thinwire.web.connections import MAX_CONNECTIONS, BoundedProtocol
from thinwire.web.settings import Settings, listen_address, lock_beside, reach_options

PARENT_S = 0.25
GRACE_S = 2
STDERR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the dashboard until a signal and return the exit code."""
    given = _parser().parse_args(arguments)
    try:
        return _serve(given)
    except ThinwireError as error:
        print(error.text(), file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m thinwire.web", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--database", required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("--cert", type=Path)
    parser.add_argument("--key", type=Path)
    parser.add_argument("--name", action="append", default=[])
    parser.add_argument("--proxy", default="")
    parser.add_argument("--parent", type=int)
    return parser


def _serve(given: argparse.Namespace) -> int:
    """Open the store and serve until the end.

    A password in --database is refused, because every user of the machine can read a command line.
    """
    url = urlsplit(given.database)
    if url.password or any("password" in key.lower() for key in parse_qs(url.query, keep_blank_values=True)):
        raise UsageError(
            "--database has a password in it", why="every user of this machine can read a command line",
            hint="postgresql://USER@HOST/NAME, and the password in ~/.pgpass",
        )  # fmt: skip
    lock = given.lock or lock_beside(database_url(given.database).render_as_string(hide_password=False))
    host, port = listen_address(given.listen, tls=bool(given.cert and given.key), lock=lock)
    listener = bind(host, port, "--listen")
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store.open(given.database))
        if not is_loopback(host) and not store.users.has_admin():
            raise UsageError(
                f"the dashboard does not listen on {host} before there is an admin",
                "users log in with passwords there", "thinwire aggregator users add NAME --role admin",
            )  # fmt: skip
        stack.enter_context(listener)
        if given.log:
            stack.enter_context(bounded_log(given.log, MAX_LOG_BYTES, outputs=(STDERR,)))
        settings = Settings(
            database=given.database, host=host, port=listener.getsockname()[1], lock=lock, names=tuple(given.name),
            tls=bool(given.cert), proxy=given.proxy,
        )  # fmt: skip
        if settings.lock:
            own = stack.enter_context(lock_file(settings.lock.with_name(DASHBOARD_LOCK)))
            write_about(own, {})  # the last holder's pid may be that of another program now
            said = {
                "dashboard": host_port(host, settings.port), "url": settings.url, "version": __version__,
                "standalone": given.standalone, "options": reach_options(given.name, given.proxy, given.cert),
            }  # fmt: skip
            write_about(own, said)
        server = page(settings, store, given.cert, given.key)
        for ending in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises the signal again when it has ended
            signal.signal(ending, lambda *_: setattr(server, "should_exit", True))
        asyncio.run(_until_the_end(server, listener, given.parent, given.cert))
    return 0


def page(
    settings: Settings, store: Store, certificate: Path | None = None, key: Path | None = None
) -> uvicorn.Server:  # fmt: skip
    """Return the dashboard's server, which ends once its `should_exit` is set; with a certificate it speaks TLS."""
    server: uvicorn.Server
    app = create_app(settings, store, closing=lambda: server.should_exit)
    gc.collect()
    gc.freeze()  # a full collection would go through all imported modules again, which holds a read up for 80 ms
    config = uvicorn.Config(
        app, http=BoundedProtocol, log_level="error", access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S, limit_concurrency=MAX_CONNECTIONS, ws="none",
        ssl_certfile=certificate, ssl_keyfile=key,
    )  # fmt: skip
    server = uvicorn.Server(config)
    return server


class Certificate:
    """Loads the certificate's file again once it has changed."""

    def __init__(self, file: Path) -> None:
        self._file, self._loaded = file, file.stat().st_mtime_ns

    def look(self, config: uvicorn.Config) -> None:
        """Load a renewed certificate for later connections; those that are open go on."""
        with contextlib.suppress(OSError):  # one of the two files is not written yet: the next look finds both
            changed = self._file.stat().st_mtime_ns
            if changed != self._loaded and config.ssl is not None and config.ssl_keyfile is not None:
                config.ssl.load_cert_chain(self._file, config.ssl_keyfile)
                self._loaded = changed


async def _until_the_end(
    server: uvicorn.Server, listener: socket.socket, parent: int | None, certificate: Path | None = None
) -> None:  # fmt: skip
    """Serve until a signal or the end of the parent, and print `ready` when it listens.

    A certificate that was renewed is loaded for later connections.

    The parent's process id is polled: a signal on the parent's death would follow the death of one of its threads.
    """
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    said, watched = False, Certificate(certificate) if certificate else None
    while not serving.done():
        if server.started and not said:
            print(f"ready {host_port(*listener.getsockname()[:2])}", flush=True)
            said = True
        if watched and said:
            watched.look(server.config)
        if parent is not None and os.getppid() != parent:
            server.should_exit = True
        await asyncio.wait([serving], timeout=PARENT_S if said else 0.02)
    await serving


if __name__ == "__main__":
    raise SystemExit(main())
