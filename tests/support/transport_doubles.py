"""A roster and a spool as small as their protocols allow, and what builds a fleet and its links on them."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tests.support.checked_routes  # noqa: F401  # each device API is made sooner
from thinwire.core.errors import NotInvited, Refused
from thinwire.core.fleet import DeviceRow, DeviceState, Hello, How, Joining
from thinwire.core.invitation import Invitation
from thinwire.core.serialization import arrived_from_bytes, arrived_to_bytes, reply_to_bytes
from thinwire.core.types import ReplyHeader, UpdateId
from thinwire.flower import FlowerFleet
from thinwire.transport.device.enroll import join
from thinwire.transport.device.identity import Trust, device_key
from thinwire.transport.device.link import HttpsLink, LinkOptions
from thinwire.transport.server.tls import InternalCA


def drawn_invitation(pin: str) -> Invitation:
    """An invitation that no aggregator gave."""
    return Invitation(pin, secrets.token_hex(16))


@dataclass
class MemoryRoster:
    """Devices in a dict; `invitations` maps a secret to the fingerprint that used it, or to ""."""

    devices: dict[str, DeviceRow] = field(default_factory=dict)
    hellos: list[Hello] = field(default_factory=list)
    invitations: dict[str, str] = field(default_factory=dict)
    notes: list[tuple[str, str, str, str]] = field(default_factory=list)  # kind, address, why, name
    identities: dict[str, str] = field(default_factory=dict)  # of runs that go on
    over: dict[str, str] = field(default_factory=dict)  # identities of runs that are over

    def rows(self) -> Sequence[DeviceRow]:
        return list(self.devices.values())

    def by_fingerprint(self, fingerprint: str) -> DeviceRow | None:
        return next((row for row in self.devices.values() if row.fingerprint == fingerprint), None)

    def enrol(self, name: str, fingerprint: str, public_key: bytes, how: How) -> DeviceRow:
        if name in self.devices:
            raise Refused(f"the name {name!r} is taken", why="another key has it")
        return self.devices.setdefault(name, DeviceRow(name, fingerprint, public_key, "approved", how, time.time()))

    def join(self, joining: Joining) -> DeviceRow:
        used_by = self.invitations.get(joining.secret)
        if used_by is None or used_by not in ("", joining.fingerprint):
            why = "unknown" if used_by is None else "used"
            raise NotInvited("this invitation is not usable", why=why)
        if not used_by:
            self.enrol(joining.name, joining.fingerprint, joining.public_key, "invitation")
            self.invitations[joining.secret] = joining.fingerprint
        row = self.by_fingerprint(joining.fingerprint)
        assert row is not None
        return row

    def leave(self, name: str) -> None:
        self.put(name, "revoked")

    def seen(self, hello: Hello, at: float) -> None:
        self.hellos.append(hello)

    def sequences(self, name: str) -> Mapping[str, int]:
        return {}

    def runs(self) -> Mapping[str, str]:
        return self.identities

    def ended(self, runs: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(run for run, identity in runs.items() if self.over.get(run) == identity)

    def note(self, kind: str, address: str, why: str, name: str = "") -> None:
        self.notes.append((kind, address, why, name))

    def put(self, name: str, state: DeviceState) -> None:
        self.devices[name] = replace(self.devices[name], state=state)


@dataclass
class FolderSpool:
    """Files in a folder: `ID` with the parts, `ID.header` beside it once it is visible."""

    folder: Path

    def path(self, update_id: UpdateId) -> Path:
        return self.folder / f"{update_id.run}-{update_id.device}-{update_id.sequence}"

    def draft(self, update_id: UpdateId) -> Path:
        self.folder.mkdir(exist_ok=True)
        return self.folder / f".{uuid.uuid4().hex}"

    def partial(self, update_id: UpdateId, digest: str) -> Path:
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f".partial-{update_id.device}-{update_id.sequence}-{digest[:16]}"
        path.touch()
        return path

    def drop_partial(self, device: str) -> None:
        for path in self.folder.glob(f".partial-{device}-*"):
            path.unlink()

    def drop_unused(self, run_id: str, but: Collection[Path] = ()) -> None:
        raise NotImplementedError

    def commit(self, draft: Path, header: ReplyHeader, received: bytes = b"") -> None:
        os.replace(draft, self.path(header.update_id))
        self._header(header.update_id).write_bytes(
            arrived_to_bytes(header, received) if received else reply_to_bytes(header)
        )

    def header(self, update_id: UpdateId) -> ReplyHeader | None:
        path = self._header(update_id)
        return _read(path) if path.exists() else None

    def headers(self) -> Sequence[ReplyHeader]:
        paths = sorted(self.folder.glob("*.header"), key=lambda path: path.stat().st_mtime_ns)
        return [_read(path) for path in paths]

    def open(self, update_id: UpdateId) -> Iterator[bytes]:
        header = self.header(update_id)
        assert header is not None
        with open(self.path(update_id), "rb") as file:
            for part in header.parts:
                yield file.read(part.length)

    def delete(self, update_id: UpdateId) -> None:
        self.path(update_id).unlink(missing_ok=True)
        self._header(update_id).unlink(missing_ok=True)

    def drafts(self) -> list[Path]:
        return list(self.folder.glob(".*"))

    def _header(self, update_id: UpdateId) -> Path:
        path = self.path(update_id)
        return path.with_name(f"{path.name}.header")


def _read(path: Path) -> ReplyHeader:
    header = arrived_from_bytes(path.read_bytes())
    assert isinstance(header, ReplyHeader)
    return header


class Place:
    """A fleet with its roster and spool; `restart` is what a restart of the aggregator is.

    With `tls` devices join by invitations that are made here. `api` stands before the fleet's own address where tests
    put something in between.
    """

    def __init__(
        self, folder: Path, roster: Any = None, spool: Any = None, *, tls: bool = False, **options: Any
    ) -> None:
        self.folder, self.api = folder, ""
        self.authority = InternalCA(folder / "ca") if tls else None
        if self.authority is not None:
            options["authority"] = self.authority
        self._spool = spool or (lambda: FolderSpool(folder / "spool"))
        self.roster: Any = roster or MemoryRoster()
        self.spool: Any = self._spool()
        self.options: dict[str, Any] = {"grace_s": 0.2, **options}
        self.fleet = FlowerFleet(self.roster, self.spool, **self.options)
        self.new_secret: Callable[[], str] = self._drawn  # of a new invitation
        self.links: list[HttpsLink] = []

    @property
    def url(self) -> str:
        return f"{'https' if self.authority else 'http'}://{self.api or self.fleet.address}"

    def invite(self) -> Invitation:
        assert self.authority is not None
        return Invitation(self.authority.pin, self.new_secret())

    def _drawn(self) -> str:
        made = drawn_invitation("").secret
        self.roster.invitations[made] = ""
        return made

    def link(self, name: str, **options: Any) -> HttpsLink:
        """A link with these `LinkOptions`; on a TLS device API its device joins first, if it has not."""
        folder = self.folder / "clients" / name
        folder.mkdir(parents=True, exist_ok=True)
        if self.authority is not None and Trust.load(folder) is None:
            url = f"https://{self.fleet.address}"
            join(url, self.invite(), device_key(folder), name, {}).trust.save(folder)
        link = HttpsLink(self.url, device_key(folder), name, folder, Trust.load(folder), LinkOptions(**options))
        self.links.append(link)
        return link

    def restart(self) -> None:
        port = int(self.fleet.address.rsplit(":", 1)[1])
        self.fleet.close()
        self.spool = self._spool()
        self.fleet = FlowerFleet(self.roster, self.spool, port=port, **self.options)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.fleet.close()


@contextlib.contextmanager
def place(folder: Path, **options: Any) -> Iterator[Place]:
    made = Place(folder, **options)
    try:
        yield made
    finally:
        made.close()
