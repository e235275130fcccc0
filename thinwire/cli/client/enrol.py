"""`thinwire client join` and `thinwire client leave`: enroll this device at an aggregator, and revoke it there.

To join is to make a key, send it with an invitation, and save the CAs to trust. To leave is to revoke the device at the
aggregator first. Only then its key and all state that was made from local data are deleted, but for its privacy ledger.

A client that begins with a new key goes on with the privacy ledger of one that left the same state directory, whatever
its name was: the data are those of this machine, and what they spent stays spent.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli import console
from thinwire.cli.local_state import command_line, joined_url
from thinwire.core import formatting
from thinwire.core.start_options import StartOptions

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

    from thinwire.core.invitation import Invitation
    from thinwire.transport.device.identity import Trust


STDIN, VARIABLE = "-", "THINWIRE_INVITE"
MAX_CHARACTERS = 1000  # read from standard input: an invitation has 101


@dataclass(frozen=True)
class Standing:
    """The result of a join, as both ends show it. `again` is True if the device had joined before."""

    name: str
    state: str
    fingerprint: str
    url: str
    pin: str
    again: bool = False

    def tell(self, home: Path | None, json: bool) -> None:
        """Print the result and the command to paste next."""
        if json:
            console.document({key: value for key, value in vars(self).items() if key != "again"})
            return
        joined = "has joined already" if self.again else "has joined"
        console.line(f"{self.name} {joined}: {self.url}")
        console.line(f"key      {formatting.grouped(self.fingerprint)}")
        console.line(f"pin      {formatting.grouped(self.pin) if len(self.pin) == 64 else self.pin}")
        if self.state == "pending":
            console.line("state    waits to be approved: the aggregator's operator compares the key's fingerprint")
            console.line(f"         there: thinwire devices approve {self.name}")
        else:
            console.line(f"state    {self.state}")
        start = f"client start --task NAME=MODULE --name {self.name}"
        console.line(f"next     {command_line(start, home)}")
        console.line(
            f"         {command_line(f'client service install --name {self.name}', home)}    (once that works)"
        )


def join(url: str, given: str | None, name: str, home: Path | None) -> Standing:
    """Join the aggregator at `url`; a repeated join returns the present state and does not use up the invitation.

    `given` is the typed invitation, `-` for standard input, or None.
    """
    from thinwire import __version__
    from thinwire.core.errors import Refused, UsageError
    from thinwire.core.statedir import client_home, find_home, hold
    from thinwire.transport.device.connect import Address
    from thinwire.transport.device.enroll import join as join_over
    from thinwire.transport.device.identity import KEY_FILE, Trust, device_key
    from thinwire.transport.protocol.signing import Signer

    invitation = read(given)
    if given not in (None, STDIN):
        console.note(
            "note: users of this machine can see an invitation in a command line; - reads it from standard input"
        )
    address = Address.parse(url if "://" in url else f"https://{url}")
    url = f"{'https' if address.tls else 'http'}://{address}"
    folder = client_home(find_home(home), name)
    with hold(folder / "lock", {"joining": url}):
        fresh = not (folder / KEY_FILE).exists()
        trust, inherited = Trust.load(folder), left_ledger(folder)
        key = device_key(folder)
        if trust is not None:
            _require_same(trust, invitation, name, home)
            return Standing(name, _state(trust, key), Signer(key).fingerprint, trust.url, invitation.pin, again=True)
        versions = {"thinwire": __version__, "python": platform.python_version(), "machine": platform.machine()}
        try:
            got = join_over(url, invitation, key, name, versions)
        except (Refused, UsageError):
            if fresh:  # refused; without a response the key stays, because the aggregator may know it
                (folder / KEY_FILE).unlink()
            raise
        take_over(folder, inherited)
        got.trust.save(folder)
    return Standing(got.name, got.state, got.fingerprint, got.trust.url, invitation.pin)


def left_ledger(folder: Path) -> bytes | None:
    """Return the privacy ledger of a client that left this state directory, for the client of `folder`; None if none.

    A ledger that begins with the client's own one is newer, and counts. Raise `UsageError` if the client has none and
    several have left, because it is not known whose data it gets.
    """
    from thinwire.client.privacy_ledger import FILE
    from thinwire.core.errors import UsageError
    from thinwire.transport.device.identity import KEY_FILE

    own = (folder / FILE).read_bytes() if (folder / FILE).exists() else b""
    left = {
        path.parent: path.read_bytes()
        for path in sorted(folder.parent.glob(f"*/{FILE}"))
        if path.parent != folder and not (path.parent / KEY_FILE).exists()
    }
    newest = dict[bytes, Path]()
    for place, data in left.items():
        if data.startswith(own) and not any(other != data and other.startswith(data) for other in left.values()):
            newest.setdefault(data, place)
    if len(newest) > 1:
        places = [str(place / FILE) for place in newest.values()]
        raise UsageError(
            f"{len(newest)} clients have left {folder.parent}, and each has a privacy ledger",
            why="what their data have spent stays spent, and it is not known whose data this client gets",
            hint=f"copy that of the same data: cp -p {places[0]} {folder / FILE}    (others: {', '.join(places[1:])})",
        )
    return next(iter(newest), None)


def take_over(folder: Path, ledger: bytes | None) -> None:
    """Store a ledger that was left as that of the client of `folder`; the copy that was left stays."""
    from thinwire.client.privacy_ledger import FILE
    from thinwire.core.statedir import write_atomically

    if ledger and (not (folder / FILE).exists() or (folder / FILE).read_bytes() != ledger):
        write_atomically(folder / FILE, ledger)
        console.note("the privacy ledger of a client that left this state directory goes on here")


def read(given: str | None) -> Invitation:
    """Return the invitation: the typed one, else THINWIRE_INVITE, else for `-` a line of standard input.

    `UsageError` if none of them has one.
    """
    from thinwire.core.errors import UsageError
    from thinwire.core.invitation import Invitation

    text = given if given not in (None, STDIN) else os.environ.get(VARIABLE)
    if text is None and given == STDIN:
        if sys.stdin.isatty():
            console.note("paste the invitation, then Enter:")
        text = sys.stdin.readline(MAX_CHARACTERS)
    if text is None:
        raise UsageError(
            "there is no invitation", why=f"it stands behind the URL, or in {VARIABLE}",
            hint="thinwire client join URL -    (and paste it), or get one from the operator: thinwire devices invite",
        )  # fmt: skip
    return Invitation.parse(text)


def _state(trust: Trust, key: ec.EllipticCurvePrivateKey) -> str:
    """Return the state of the device's row at the aggregator, or a sentence if it is not available now."""
    from thinwire.core.errors import ThinwireError
    from thinwire.transport.device.enroll import check_enrollment

    try:
        kind = check_enrollment(trust.url, trust, key).kind
    except ThinwireError as error:
        return f"the request failed: {error.what}"
    return "approved" if kind == "assignment" else kind


def _require_same(trust: Trust, invitation: Invitation, name: str, home: Path | None) -> None:
    """Raise `ThinwireError` if the invitation is of another aggregator than the joined one."""
    from thinwire.core.errors import ThinwireError
    from thinwire.core.invitation import SYSTEM

    if invitation.pin not in (SYSTEM if trust.system else "", *trust.pins):
        raise ThinwireError(
            f"{name} has joined another aggregator already: {trust.url}", why="it has one key, which is known there",
            hint=f"another --name; or first: {command_line(f'client leave --name {name}', home)}",
        )  # fmt: skip


def leave(name: str, home: Path | None, force: bool) -> None:
    """Revoke the device at its aggregator, then delete its key and all state made from local data.

    With `force` the state is deleted even without a response of the aggregator. The key is deleted last, so that an
    interrupted command can be typed again.
    """
    from thinwire.cli.service import service
    from thinwire.client.run_store import delete_learned
    from thinwire.core.errors import NotFound, Refused, ThinwireError, Unreachable, UsageError
    from thinwire.core.statedir import find_home, hold, holder, sync_path
    from thinwire.transport.device.identity import KEY_FILE, TRUST_FILE, Trust, device_key
    from thinwire.transport.device.link import HttpsLink

    folder = find_home(home) / "clients" / name
    if not (folder / KEY_FILE).exists():
        raise NotFound(
            f"no client {name!r} is known anywhere", why=f"there is no key in {folder}",
            hint=f"{command_line('client status', home)} lists those of this machine",
        )  # fmt: skip
    stop = service(name)
    if about := holder(folder / "lock"):
        pid = about.get("pid", "?")
        first = stop or f"Ctrl-C where it runs, or kill {pid}"
        raise ThinwireError(
            f"{name} is running: process {pid}", why="it would go on with a key that nobody takes any more",
            hint=f"stop it first ({first}), then: {command_line(f'client leave --name {name}', home)}",
        )  # fmt: skip
    if stop:
        console.note(f"its service would start again without a key: {stop}")
    with hold(folder / "lock", {"leaving": name}):
        url = aggregator_of(folder)
        try:
            trust = Trust.load(folder)
            if url is None:
                raise UsageError(f"it is not known where {name} has joined", why="its join had no response")
            with contextlib.closing(HttpsLink(url, device_key(folder), name, folder, trust)) as link:
                link.leave()
            console.line(f"{name} has left {url}: nobody can come with its key any more")
        except ThinwireError as error:
            kind = getattr(error.__cause__, "kind", "")  # a refusal of another program has another kind
            if isinstance(error, Refused) and kind in ("revoked", "unknown"):
                console.line(f"{name} was revoked at {url} before: {error.why}")
            elif not force:
                raise Unreachable(
                    f"{name} has not left, and its key is still here: {error.what}", why=error.why,
                    hint="try again; or delete the key all the same: "
                    + command_line(f"client leave --name {name} --force", home),
                ) from error  # fmt: skip
            else:
                at = url or "its aggregator"
                console.note(str(error))
                console.line(f"{at} does not know it yet; its operator can: thinwire devices revoke {name}")
        delete_learned(folder)  # the key goes last: with it this command can be typed again
        for file in (KEY_FILE, TRUST_FILE):
            (folder / file).unlink(missing_ok=True)
        sync_path(folder)
    console.line("its key is deleted, and with it what it learned here: updates, residuals, models, plans and logs")
    console.line(f"the data that it trained on were not touched; its settings stay in {folder}")


def aggregator_of(folder: Path) -> str | None:
    """Return the URL of the joined aggregator, else that of the last start; None without either."""
    if (url := joined_url(folder)) is not None:
        return url
    last = StartOptions.load(folder)
    return last.options.get("aggregator") if last else None
