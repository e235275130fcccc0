"""`thinwire aggregator doctor`: check the aggregator's machine from its state directory to its dashboard.

Every finding comes with a hint. Nothing is changed.
"""

from __future__ import annotations

import socket
import ssl
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.doctor.checks import Finding, found, kernels, private, room, unseen
from thinwire.cli.local_state import has_database, start_again
from thinwire.core import formatting
from thinwire.core.statedir import AggregatorHome

if TYPE_CHECKING:
    from thinwire.store import DeviceInfo, Store

CONNECT_TIMEOUT_S = 5.0
SKEW_S = 60.0  # median skew of the devices from which the aggregator's clock is reported as wrong
SOON = timedelta(days=14)  # our own certificates are renewed long before


def examine(home: Path, about: dict[str, Any] | None, typed: Path | None = None) -> list[Finding]:
    """Run all checks in the order in which they depend on each other, and return the findings.

    `about` is the description of the running aggregator, or None. `typed` is the --home of the command, for hints.
    """
    place = AggregatorHome(home / "aggregator")
    findings = [private("folder", place.root)]
    if findings[0].ok is False:
        nothing = [unseen(what, "there is no folder") for what in ("disk", "store")]
        return [*findings, nothing[0], found("kernels", kernels), nothing[1]]
    findings.append(room("disk", place.root))
    findings.append(_service(about, typed))
    findings.append(found("kernels", kernels))
    findings += _store(place, about is not None)
    findings.append(found("device_api", lambda: _device_api(about)))
    findings.append(found("certificate", lambda: _certificate(place.root / "tls", about, typed)))
    findings.append(found("dashboard", lambda: _dashboard(about)))
    return findings


def _service(about: dict[str, Any] | None, typed: Path | None) -> Finding:
    """Return the finding on the process of the aggregator."""
    if about is None:
        return Finding("service", False, "no aggregator is running here", start_again(typed))
    return Finding("service", True, f"process {about['pid']}, version {about.get('version')}")


def _store(place: AggregatorHome, alive: bool) -> Iterator[Finding]:
    """Yield the findings on the database, on the clock compared with the devices, and on the devices."""
    from thinwire.store import Store

    none = Finding("store", False, f"{place.database} is not there", "thinwire aggregator start makes it")
    there = found("store", lambda: "" if has_database(place) else none)
    if not there.ok:
        yield there
        return
    opened: list[Store] = []

    def version() -> str:
        opened.append(Store.open(place.database, read_only=True))
        held = sum(path.stat().st_size for path in place.root.glob(f"{place.database.name}*"))
        return f"{place.database.name}, {formatting.size(held)}, of this version"

    yield found("store", version)
    for store in opened:
        devices = list(store.devices())
        yield found("clock", lambda devices=devices: _clock(devices))  # type: ignore[misc]  # mypy cannot type a default
        yield found("devices", lambda devices=devices: _devices(devices, alive))  # type: ignore[misc]  # as above
        store.close()


def _clock(devices: list[DeviceInfo]) -> Finding:
    """Compare this clock with the devices': one device may be wrong, but most are not wrong by the same amount."""
    skews = [float(info.hello.get("link", {}).get("skew_s", 0.0)) for info in devices if info.seen_at]
    now = datetime.now(UTC)
    newest = max((info.seen_at or 0.0 for info in devices), default=0.0)
    if newest > time.time() + SKEW_S:
        ahead = formatting.duration(newest - time.time())
        return Finding("clock", False, f"{now:%Y-%m-%d %H:%M} UTC, but a device was seen {ahead} later", "timedatectl")
    middle = statistics.median(skews) if skews else 0.0
    if abs(middle) > SKEW_S:
        way = "ahead of" if middle > 0 else "behind"
        return Finding(
            "clock", False, f"{now:%Y-%m-%d %H:%M} UTC: {formatting.duration(abs(middle))} {way} most devices",
            "timedatectl set-ntp true",
        )  # fmt: skip
    return Finding(
        "clock", True, f"{now:%Y-%m-%d %H:%M} UTC, and the devices agree" if skews else f"{now:%Y-%m-%d %H:%M} UTC"
    )


def _devices(devices: list[DeviceInfo], alive: bool) -> Finding:
    """Return the finding on the devices: how many are known, online, revoked and waiting for approval."""
    states = [info.row.state for info in devices]
    there = f"{sum(info.online for info in devices)} there, " if alive else ""
    said = f"{len(devices)} known, {there}{states.count('revoked')} revoked"
    if waiting := [info.row.name for info in devices if info.row.state == "pending"]:
        return Finding(
            "devices", True, f"{said}; waiting to be approved: {', '.join(waiting[:8])}",
            f"thinwire devices approve {waiting[0]}, after comparing its fingerprint",
        )  # fmt: skip
    return Finding("devices", True, said)


def _device_api(about: dict[str, Any] | None) -> Finding | str:
    """Check that the device API accepts connections."""
    if about is None:
        return unseen("device_api", "no aggregator is running")
    with socket.create_connection(_here(about), timeout=CONNECT_TIMEOUT_S):
        pass
    return f"{about['listen']} answers; devices reach it at {', '.join(about.get('urls') or [])}"


def _here(about: dict[str, Any]) -> tuple[str, int]:
    """Return the (host, port) by which this machine reaches the device API."""
    host, _, port = str(about["listen"]).rpartition(":")
    return {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]")), int(port)


def _certificate(folder: Path, about: dict[str, Any] | None, typed: Path | None = None) -> Finding | str:
    """Check that the certificate of the device API is valid, not about to expire, and has all names."""
    from thinwire.transport.protocol.certificates import chains, shown

    rows, pin = chains(folder), (about or {}).get("pin")
    if about is not None and pin is None:
        return "none: the device API is on this machine only"
    ours = next((row for row in rows if pin in (row.pin, None)), None)
    if ours is None and about is None:
        return "none of ours yet"
    leaf, now = ours.leaf if ours else shown(*_here(about or {}), CONNECT_TIMEOUT_S), datetime.now(UTC)
    said = f"pin {ours.pin if ours else pin}\nuntil {leaf.ends:%Y-%m-%d}, for {', '.join(leaf.names)}"
    if not leaf.begins <= now < leaf.ends - SOON:
        renew = f"a start makes it again: {start_again(typed)}" if ours else "replace the files of --cert and --key"
        return Finding("certificate", False, said, f"is the clock right? {renew}")
    if ours and (missing := [name for name in ours.wanted if name not in leaf.names]):
        return Finding("certificate", False, f"{said}\nit lacks {missing[0]}", "thinwire aggregator ca rotate")
    if ours and len(rows) > 1:
        said += f"\n{len(rows)} CAs are served until every device holds the newest: thinwire aggregator ca show"
    return said


def _dashboard(about: dict[str, Any] | None) -> Finding | str:
    """Check that the dashboard answers."""
    if about is None:
        return unseen("dashboard", "no aggregator is running")
    if not about.get("dashboard"):
        return "none (--no-dashboard)"
    try:
        url = str(about.get("dashboard_url") or f"http://{about['dashboard']}")
        scheme = url.partition(":")[0]
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing secret is sent or believed
        handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        direct = urllib.request.build_opener(*handlers)
        with direct.open(f"{scheme}://{about['dashboard']}/healthz", timeout=CONNECT_TIMEOUT_S) as answer:
            elsewhere = "" if scheme == "https" else f"; from elsewhere: ssh -L 8080:{about['dashboard']} HOST"
            return f"{url} answers ({answer.status}){elsewhere}"
    except urllib.error.HTTPError as error:
        return Finding(
            "dashboard",
            False,
            f"{about['dashboard']} answers with {error.code}",
            "dashboard.log in the state directory says more",
        )
