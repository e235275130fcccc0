"""The aggregator's process: lock the state directory, open the store, serve device API and dashboard, drive the runs.

`serve_here` does so in this process, `serve_in_background` in a new one that outlives the command. The dashboard is a
process of its own (`dashboard.py`). The output of an aggregator in the background goes to service.log, which is
rotated: two files bound its size.

`HOME/aggregator/aggregator.log` has one line for each thing that the operator may have to react to (`Reporter`):
devices that join, connect and disconnect, runs that begin, wait and end, rounds without a step, and the failures of
devices; `thinwire aggregator logs` shows it. What every round brings is not in it: `thinwire runs watch` and the
dashboard show that.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli import console
from thinwire.cli.aggregator.dashboard import RENEWED_S, Dashboard, Exposure, end_running
from thinwire.cli.aggregator.tls import Certificates, urls, write_invite
from thinwire.cli.local_state import (
    adds_device,
    aggregator_home,
    alive,
    command_line,
    dashboard_of,
    open_store,
    options_of_this_command,
)
from thinwire.cli.params import Address
from thinwire.core.events import (
    ENDED,
    NO_STEP,
    ClientFailed,
    DeviceOffline,
    DeviceOnline,
    Event,
    RoundClosed,
    RunNoted,
    RunStatusChanged,
)
from thinwire.core.formatting import counted, duration
from thinwire.core.log_file import MAX_LOG_BYTES, Logbook, bounded_log
from thinwire.core.run_events import DeletionPostponed, is_sampled, without_sample
from thinwire.core.signals import ended_by_signals, until
from thinwire.core.start_options import NOT_KEPT, StartOptions, start_command

if TYPE_CHECKING:
    from thinwire.core.statedir import AggregatorHome
    from thinwire.store import Store

AGGREGATOR_LOG = "aggregator.log"
ACTIONS_S = 1.0  # between two looks for new actions on devices
MAX_ACTIONS = 100  # reported at one look
ACTIONS = {
    "enrol": "{device} is new ({detail})",
    "join": "{device} has joined with an invitation",
    "add": "{device} is known now",
    "approve": "{device} is approved by {who}",
    "revoke": "{device} is revoked by {who}",
    "leave": "{device} has left",
    "rename": "{device} is a new name: it {detail} before",
}


class Reporter:
    """Reports events of runs and devices as lines to `say`; any thread may call it.

    A failure of a device is reported when its kind or its text is new in that run.
    """

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self._store, self._say, self._acting = store, say, threading.Lock()
        self._faults = set[tuple[str, str, str, str]]()
        self._sampled: dict[str, bool] = {}
        self._statuses: dict[str, str] = {}
        self._acted_at = max((one.at for one in store.audit.actions(limit=1)), default=0.0)

    def event(self, run_id: str, event: Event) -> None:
        """Report an event of a run, or with an empty `run_id` of a device, if an operator may have to know it."""
        if isinstance(event, DeviceOnline | DeviceOffline):
            self.actions()  # first what is the cause: a device is new, or a person revoked it
        for line in self._lines(run_id, event):
            self._say(f"{run_id}: {line}" if run_id else line)

    def actions(self) -> None:
        """Report what people and devices did to the registry of devices since the last call."""
        with self._acting:
            found = [one for one in self._store.audit.actions(limit=MAX_ACTIONS) if one.at > self._acted_at]
            for one in reversed(found):
                self._acted_at = one.at
                if (said := ACTIONS.get(one.what)) is not None:
                    waits = one.what == "enrol" and one.detail.endswith("pending")
                    more = f": thinwire devices approve {one.device}" if waits else ""
                    self._say(said.format(device=one.device, who=one.who, detail=one.detail) + more)

    def _lines(self, run_id: str, event: Event) -> Iterator[str]:
        from thinwire.reports.reason_text import sentence

        secret = bool(run_id) and self._is_sampled(run_id)
        if (shown := without_sample(event) if secret else event) is None:
            return
        match event := shown:
            case DeviceOnline():
                yield f"{event.device} is online"
            case DeviceOffline():
                yield f"{event.device} is offline: {event.why}"
            case RunStatusChanged():
                if event.status in ENDED:
                    self._faults -= {fault for fault in self._faults if fault[0] == run_id}
                before, self._statuses[run_id] = self._statuses.get(run_id), event.status
                if event.status != before or event.status != "running":  # each round of a running run changes the text
                    told = () if event.text.startswith(event.status) else (event.status,)
                    yield ": ".join(filter(None, (*told, event.text)))
            case RunNoted():
                yield sentence(event.note)
            case DeletionPostponed():
                yield (
                    f"the clock is {duration(event.ahead_s)} ahead of the last time that was believed: "
                    "nothing is deleted by age for an hour; if the clock is wrong, set it right now"
                )
            case RoundClosed() if event.reason in NO_STEP:
                came = "" if secret else f": {counted(len(event.aggregated) + len(event.dropped), 'update')}"
                yield f"round {event.round} ended without a step ({event.reason}), after {event.seconds:.1f} s{came}"
            case ClientFailed() if not event.is_over:
                if (fault := (run_id, event.device, event.kind, event.text)) not in self._faults:
                    self._faults.add(fault)
                    yield f"{event.device} {event.kind}{f': {event.text}' if event.text else ''}"

    def _is_sampled(self, run_id: str) -> bool:
        """Return True if nobody may see who took part in a round of this run."""
        if run_id not in self._sampled:
            self._sampled[run_id] = is_sampled(self._store.run(run_id).plan)
        return self._sampled[run_id]


START_S = 60.0  # of an aggregator
SERVICE_LOG = "service.log"


@dataclass(frozen=True)
class Wanted:
    """The options of `aggregator start`: addresses, certificates, and whether stock Flower nodes are allowed."""

    listen: Address
    dashboard: Address | None
    certificates: Certificates = field(default_factory=Certificates)
    stock: bool = False
    dashboard_names: tuple[str, ...] = ()
    proxy: str = ""

    @property
    def exposure(self) -> Exposure:
        """Return where browsers reach the dashboard; there must be one."""
        assert self.dashboard is not None
        return Exposure(self.dashboard, self.dashboard_names, self.proxy)


def note_start() -> None:
    """Print at a terminal that the start has begun, because the imports take a second or two."""
    if sys.stderr.isatty():
        console.note("starting the aggregator ...")


def serve_here(wanted: Wanted, home: Path | None) -> int:
    """Serve in this process until SIGTERM, Ctrl-C or `thinwire aggregator stop`, and return the exit code."""
    note_start()
    from thinwire.core.clock import DOWN_SINCE, down_since_of, last_beat
    from thinwire.core.statedir import write_about

    place = aggregator_home(home)
    served_at = down_since_of(place.lock)
    down_since = last_beat(place.lock)  # a restored folder has no lock file, and therefore no last beat
    with _alone(place.lock, home) as lock:
        # Others see that this process starts, before its imports, which take seconds. A start that fails before the
        # store has the last beat leaves it in the file.
        write_about(lock, {DOWN_SINCE: served_at})
        os.utime(lock, (down_since, down_since))
        return _serve(wanted, home, place, lock, down_since)


def _serve(wanted: Wanted, home: Path | None, place: AggregatorHome, lock: int, down_since: float) -> int:
    """Serve as the holder of `lock`, whose last one was alive until `down_since`, and return the exit code."""
    from thinwire import __version__
    from thinwire.client.train.worker import imported_for_good

    with imported_for_good():
        from thinwire.cli.systemd import FILES
        from thinwire.core.clock import beating, repeating
        from thinwire.core.disk_reserve import DiskReserve
        from thinwire.core.net import allow_open_files
        from thinwire.core.owner_file import aggregator_file
        from thinwire.core.statedir import write_about
        from thinwire.flower import FlowerFleet, stock_guests
        from thinwire.server.service import RunLimits, memory_limit, serve
        from thinwire.store import FileSpool, Store

    settings = aggregator_file(place.root.parent)
    allow_open_files(FILES)
    with contextlib.ExitStack() as stack:
        ending = stack.enter_context(ended_by_signals(threading.Event()))
        stack.enter_context(bounded_log(place.root / SERVICE_LOG, MAX_LOG_BYTES))
        stack.callback(os.umask, os.umask(0o077))  # also for the files of Flower and the dashboard
        store = Store.open(place.database, upgrade=True)
        stack.callback(store.close)
        store.record_restart(time.time(), down_since)
        stack.enter_context(beating(lock))
        wanted.listen.require_free("--listen")
        if wanted.dashboard:
            wanted.exposure.require_admin(store)
            renew = partial(wanted.exposure.reach, place, wanted.certificates)
            reach = renew()
            stack.enter_context(repeating(renew, RENEWED_S, "dashboard-tls"))
        authority = wanted.certificates.authority(place.tls, wanted.listen)
        names = wanted.certificates.reached()
        if wanted.dashboard:
            page = Dashboard(store.url, place, wanted.dashboard, os.environ, console.note, reach)
        else:
            page = None
            end_running(place, also_standalone=False)  # left by an aggregator that crashed
        at = wanted.listen
        spool, limits = FileSpool(place.spool), RunLimits(store)
        said = place.root / "stock.log"
        guests = stock_guests(store.roster, said, private=authority is None) if wanted.stock else None
        fleet = FlowerFleet(
            store.roster,
            spool,
            host=at.host,
            port=at.port,
            authority=authority,
            guests=guests,
            limits=limits,
            directory=place.root,
        )
        stack.callback(fleet.close)
        if page:
            stack.enter_context(page)
        write_invite(place.tls, authority, fleet.address, names)
        about: dict[str, Any] = {
            "version": __version__, "home": str(place.root.parent), "listen": fleet.address,
            "pin": authority.pin if authority else None,
            "urls": urls(fleet.address, names) if authority else [f"http://{fleet.address}"],
            "dashboard": str(page.address) if page else (dashboard_of(place) or {}).get("dashboard"),
            "dashboard_url": page.url if page else (dashboard_of(place) or {}).get("url"),
            "control_address": guests.control_address if guests else None,
            "certificate": str(wanted.certificates.certificate.absolute()) if wanted.certificates.certificate else None,
        }  # fmt: skip
        options = options_of_this_command()
        left = left_address(place.root, options, home)
        options.save(place.root)
        _greet(store, about, home)
        if left:
            console.note(left)
        write_about(lock, about)  # from here on other processes find this aggregator; everything was printed before
        log = Logbook(place.root, console.note, file_name=AGGREGATOR_LOG)
        log(f"thinwire {__version__}, process {os.getpid()}, serves devices at {fleet.address}")
        reporter = Reporter(store, log)
        stack.enter_context(repeating(reporter.actions, ACTIONS_S, AGGREGATOR_LOG))
        code = serve(
            fleet, store, place, ending=ending, settings=settings, memory_bytes=memory_limit(settings.memory_mb),
            reserve=DiskReserve(place.root), on_event=reporter.event,
        )  # fmt: skip
        log("stopped; what was going on goes on at the next start")
        return code


def serve_in_background(home: Path | None) -> int:
    """Start the aggregator as a process of its own with this command's options, and print its output once it serves."""
    from thinwire.core.statedir import private_opener

    place = aggregator_home(home)
    if place.lock.exists():
        with _alone(place.lock, home):
            pass
    note_start()
    log = place.root / SERVICE_LOG
    typed = options_of_this_command().without(*NOT_KEPT).words()
    # -P: the folder that the person is in may hold another thinwire/
    command = [sys.executable, "-P", "-m", "thinwire.cli", "aggregator", "start", *typed]
    command += ["--home", str(home)] if home else []
    with contextlib.suppress(FileNotFoundError):
        os.replace(log, log.with_name(f"{log.name}.1"))  # it tells why the previous process ended
    with open(log, "ab", opener=private_opener) as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )

    def there() -> bool:
        """Return True if the process has ended or serves."""
        return process.poll() is not None or (alive(home) or {}).get("pid") == process.pid

    until(there, START_S)
    said = log.read_text(errors="replace").rstrip()
    if process.poll() is not None:
        console.note(said)
        return process.returncode or 1
    console.line(said)
    about = alive(home) or {}
    if about.get("dashboard") and sys.stdout.isatty():
        with open_store(home, read_only=False) as store:
            console.line(f"log in   {login_url(about['dashboard_url'], store.logins.new_code())}")
    console.note(f"it goes on in the background; {log}; end it: {command_line('aggregator stop', home)}")
    return 0


@contextlib.contextmanager
def _alone(lock: Path, home: Path | None) -> Iterator[int]:
    """Hold the lock of the state directory; `ThinwireError` describes the aggregator that holds it already."""
    from thinwire.core.errors import ThinwireError
    from thinwire.core.statedir import Held, lock_file

    with contextlib.ExitStack() as stack:
        try:
            descriptor = stack.enter_context(lock_file(lock))
        except Held:
            if (there := alive(home)) is None or "listen" not in there:
                raise  # the holder is no aggregator, or one that is starting
            dashboard = f", its page at {there['dashboard']}" if there.get("dashboard") else ""
            raise ThinwireError(
                (
                    f"an aggregator runs here already: process {there['pid']}, its device API at "
                    f"{there['listen']}{dashboard}"
                ),
                why=f"two in {lock.parent} would write over each other",
                hint=f"use that one ({command_line('aggregator status', home)}), "
                f"end it ({command_line('aggregator stop', home)}),\n"
                "or give this one a folder of its own: --home FOLDER",
            ) from None
        yield descriptor


def left_address(place: Path, options: StartOptions, home: Path | None) -> str:
    """Return a sentence if devices know an address and this start has the default, on this machine only; else ""."""
    last = StartOptions.load(place)
    if "listen" in options.options:
        return ""
    if last is None and any((place / "tls").glob("*.ca.pem")):  # a backup has the CA and not the options
        way = command_line(start_command(place, reachable=True), home)
        return f"devices have joined over TLS, and cannot reach this machine's own address: {way}"
    if last is None or "listen" not in last.options:
        return ""
    return f"the last start had another address, which its devices know: {command_line(start_command(place), home)}"


def login_url(url: str, code: str, page: str = "") -> str:
    """Return the dashboard's address with a one-time login code, which opens the list of runs, or else `page`."""
    return f"{url}/login?code={code}" + (f"&next={page}" if page else "")


def _greet(store: Store, about: dict[str, Any], home: Path | None) -> None:
    """Print the addresses of the aggregator and the commands to paste next.

    A login code is printed on a terminal only: a journal or a file is kept, and others may read it.
    """
    console.line(f"thinwire {about['version']}")
    console.line(f"state    {about['home']}")
    if about["dashboard"]:
        another = command_line("aggregator status --login", home)
        if sys.stdout.isatty():
            console.line(f"web      {login_url(about['dashboard_url'], store.logins.new_code())}")
            console.line(f"         (works once, for ten minutes; another: {another})")
        else:
            console.line(f"web      {about['dashboard_url']}")
            console.line(f"         (a code to log in with: {another})")
    if about["pin"]:
        console.line(f"api      {about['listen']} (TLS; {', '.join(about['urls'])})")
        console.line(f"pin      {about['pin']}")
    else:
        console.line(f"api      {about['listen']} (this machine only)")
    if about["control_address"]:
        console.line(f"flower   {about['control_address']} for flwr run, and stock nodes at the device API")
        console.line("         WARNING: with this, any user of this machine can run code as you")
    devices = store.devices()
    known = ", ".join(info.row.name for info in devices[:8]) + (" ..." if len(devices) > 8 else "")
    console.line(f"devices  {f'{len(devices)} known: {known}' if devices else 'none known yet'}; to add one:")
    console.line(f"           {adds_device(about, home)}")
    console.line(f"run      {command_line('run PLAN', home)}")
    if going := store.run_queue():
        console.line(f"         {', '.join(row.run_id for row in going)} {'go' if going[1:] else 'goes'} on")
