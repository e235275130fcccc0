"""The dashboard's process, `python -m thinwire.web`: the aggregator starts it, adopts one that runs, and ends it.

It is a process of its own with a lock of its own, `HOME/aggregator/dashboard.lock`. So it never stops training, and it
goes on while an aggregator that has crashed is down: runs stay readable. The next aggregator adopts it if it has the
same version and address, and else replaces it. `thinwire aggregator stop` ends it, but not one that is standalone
(`thinwire aggregator dashboard`, or its systemd unit), which belongs to whoever started it.

Beyond loopback, `Reach` and `Exposure` say who may reach it, by which names, and with which certificate: the operator's
(`--cert`), or a leaf of its own that the aggregator's CA issues. The dashboard's process gets the leaf and its key, and
never the key of the CA. Invariant: such a leaf lacks the name that devices look for, so nobody poses as the device API
with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from thinwire.cli.aggregator.tls import ANY, Certificates, own_addresses
from thinwire.cli.local_state import dashboard_of
from thinwire.cli.params import Address
from thinwire.core.errors import Refused, UsageError
from thinwire.core.net import is_ip_address
from thinwire.core.signals import until
from thinwire.core.statedir import AggregatorHome, living_holder, private_opener
from thinwire.web.settings import reach_options

if TYPE_CHECKING:
    from thinwire.core.statedir import AggregatorHome
    from thinwire.store import Store


RENEWED_S = 3600.0  # between two looks whether the leaf is due


@dataclass(frozen=True)
class Reach:
    """Holds how browsers reach the dashboard: names beyond loopback, a proxy, and the files of its certificate."""

    names: tuple[str, ...] = ()
    proxy: str = ""
    certificate: Path | None = None
    key: Path | None = None

    def words(self) -> list[str]:
        """Return the options for `python -m thinwire.web`."""
        found = [word for name in self.names for word in ("--name", name)]
        found += ["--proxy", self.proxy] if self.proxy else []
        return found + (["--cert", str(self.certificate), "--key", str(self.key)] if self.certificate else [])

    def options(self) -> list[str]:
        """Return what a running dashboard must have noted in its lock to stay."""
        return reach_options(self.names, self.proxy, self.certificate)


@dataclass(frozen=True)
class Exposure:
    """The options `--dashboard`, `--dashboard-name` and `--proxy` of `aggregator start`."""

    address: Address
    names: tuple[str, ...] = ()
    proxy: str = ""

    def require_possible(self) -> None:
        """Raise `UsageError` if the options do not fit together."""
        if self.proxy and not is_ip_address(self.proxy):
            raise UsageError(
                f"--proxy {self.proxy!r} is no address", "its headers count by the address of its connection",
                "--proxy 192.0.2.7",
            )  # fmt: skip

    def require_admin(self, store: Store) -> None:
        """Raise `Refused` if the dashboard would be open to other machines before an admin may log in."""
        if not self.address.is_loopback and not store.users.has_admin():
            raise Refused(
                f"--dashboard {self.address} would be open to other machines, and there is no admin yet",
                "users log in with passwords there, and somebody has to decide who they are",
                "thinwire aggregator users add NAME --role admin",
            )

    def reach(self, place: AggregatorHome, certificates: Certificates) -> Reach:
        """Return how the dashboard is reached; issue its certificate if it needs one that is not there or is due."""
        if self.address.is_loopback:
            return Reach(self.names, self.proxy)
        names = self.names or tuple(self._hosts())
        if certificates.certificate is not None and certificates.key is not None:
            return Reach(names, self.proxy, certificates.certificate.absolute(), certificates.key.absolute())
        from thinwire.core.statedir import private_folder
        from thinwire.transport.server.tls import InternalCA

        folder = private_folder(place.root / "dashboard-tls")
        found = Reach(names, self.proxy, folder / "leaf.pem", folder / "leaf.key")
        InternalCA(place.tls, [*certificates.names, *names]).issue(folder / "leaf.pem", folder / "leaf.key", names)
        return found

    def _hosts(self) -> list[str]:
        """Return the addresses by which other machines reach the listener."""
        return own_addresses(self.address.host) if self.address.host in ANY else [self.address.host]


READY_S = 30.0
PAUSE_S = 5.0  # between two starts of a dashboard that ended by itself
END_S = 5.0
ALIVE_CHECK_S = 0.5  # between two looks whether an adopted dashboard lives
LOG = "dashboard.log"  # its predecessor is dashboard.log.1


class Dashboard:
    """The dashboard of one aggregator: as a context it runs, is started again if it ends by itself, and ends with it.

    `address` is where it listens; `say` gets a line when it had to be started again.
    """

    def __init__(
        self, database: str, place: AggregatorHome, wanted: Address, environment: Mapping[str, str],
        say: Callable[[str], None], reach: Reach | None = None,
    ) -> None:  # fmt: skip
        self._place, self._say, self._reach = place, say, reach or Reach()
        self._log = place.root / LOG
        self._database, self._environment = database, dict(environment)
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._watch = threading.Thread(target=self._keep, name="dashboard", daemon=True)
        self.address = self._adopted(wanted) or wanted.require_free("--dashboard")

    @property
    def url(self) -> str:
        """Return the address to type into a browser."""
        return str((dashboard_of(self._place) or {}).get("url") or self.address.url)

    def __enter__(self) -> Self:
        """Wait until the dashboard listens; `Unreachable` with the last line of its log if it does not."""
        from thinwire.core.errors import Unreachable

        if dashboard_of(self._place) is None:
            self._process = self._begin()
            if not _ready(self._process, READY_S) and not self._has_another(self._process):
                self._end()
                words = ["it said nothing"]
                with contextlib.suppress(OSError):
                    words = self._log.read_text(errors="replace").strip().splitlines()[-1:] or words
                raise Unreachable(
                    f"the dashboard did not start on {self.address}",
                    why=words[0],
                    hint=f"{self._log} says more; or --no-dashboard",
                )
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ending.set()
        self._end()
        self._watch.join(END_S)

    def _adopted(self, wanted: Address) -> Address | None:
        """Return the address of a running dashboard that may stay; end one of another version or address.

        A standalone one keeps its address, and one of another version is ended for its service to start it again.
        """
        from thinwire import __version__

        if (about := dashboard_of(self._place)) is None:
            return None
        address = Address.parse(str(about["dashboard"]), "--dashboard")
        same_place = address.host == wanted.host and wanted.port in (0, address.port)
        same_place = same_place and about.get("options", []) == self._reach.options()
        is_current = about.get("version") == __version__
        if about.get("standalone"):
            if not is_current:
                end_running(self._place)
            return address
        if same_place and is_current:
            return address
        end_running(self._place)
        return None

    def _has_another(self, own: subprocess.Popen[bytes]) -> bool:
        """Return True if the state directory has another dashboard than `own`, which may stay, once that one listens.

        An aggregator that was killed while its dashboard started leaves such a one: it takes the lock before `own`.
        """

        def is_there() -> bool:
            holder = living_holder(self._place.dashboard_lock) or {}
            return bool(holder.get("dashboard")) or holder.get("pid") in (None, own.pid)

        until(is_there, READY_S)
        return self._adopted(self.address) is not None

    def _begin(self) -> subprocess.Popen[bytes]:
        """Start the process; it writes its log itself, so that it does not need us."""
        # -P: the folder of the aggregator may hold another thinwire/
        command = [sys.executable, "-P", "-m", "thinwire.web", "--database", self._database]
        command += ["--lock", str(self._place.lock), "--listen", str(self.address), "--log", str(self._log)]
        command += self._reach.words()
        with open(self._log, "ab", opener=private_opener) as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                env=self._environment, start_new_session=True,
            )  # fmt: skip

    def _keep(self) -> None:
        """Start the process again, `PAUSE_S` after each unexpected end; adopt one that was started meanwhile."""
        while not self._ending.wait(ALIVE_CHECK_S):
            own, about = self._process, dashboard_of(self._place)
            if (own is not None and own.poll() is None) or about is not None:
                continue
            code = f" ({own.returncode})" if own is not None else ""
            self._say(f"the dashboard ended{code} and is started again; training goes on. {self._log} says more")
            if self._ending.wait(PAUSE_S):
                return
            if dashboard_of(self._place) is None:
                self._process = self._begin()

    def _end(self) -> None:
        """End the dashboard, unless it is standalone."""
        end_running(self._place, also_standalone=False)
        if self._process is not None:
            self._process.terminate()  # one that does not hold its lock yet
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()


def end_running(place: AggregatorHome, also_standalone: bool = True) -> None:
    """End the dashboard that runs on this state directory, if any, and wait for its end."""
    about = dashboard_of(place)
    if about is None or (about.get("standalone") and not also_standalone):
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(about["pid"]), number)
        if until(lambda: living_holder(place.dashboard_lock) is None, END_S):
            return


def _ready(process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Return True if the process printed `ready ...` as its first line within `within_s` seconds."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], within_s)
    with contextlib.suppress(OSError):
        return bool(readable) and process.stdout.readline().startswith(b"ready")
    return False


def serve_standalone(listen: Address, home: Path | None) -> int:
    """Serve the dashboard in this process until a signal, with or without an aggregator; return the exit code.

    It takes the place of one that the aggregator has started.
    """
    from thinwire.cli import console
    from thinwire.cli.local_state import aggregator_home, command_line, has_database
    from thinwire.core.errors import NotFound, ThinwireError
    from thinwire.web.__main__ import main

    place = aggregator_home(home)
    if not has_database(place):
        raise NotFound(
            f"there is nothing to show in {place.root}",
            why="no aggregator was ever started there",
            hint=command_line("aggregator start", home) + "; or name another folder: --home FOLDER",
        )
    end_running(place, also_standalone=False)
    if about := dashboard_of(place):
        raise ThinwireError(
            f"a dashboard of this folder runs already: process {about['pid']}, at {about['dashboard']}",
            why="two would show the same",
            hint=f"use that one ({command_line('aggregator status --login', home)}), or end it: kill {about['pid']}",
        )
    console.note(f"a code to log in with: {command_line('aggregator status --login', home)}")
    given = ["--database", f"sqlite:///{place.database}", "--listen", str(listen), "--lock", str(place.lock)]
    return main([*given, "--standalone"])
