"""`thinwire client join`: how a device comes to trust an aggregator, and is known there from then on."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli import say
from thinwire.cli.places import again

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

    from thinwire.flower.device.trust import Trust
    from thinwire.flower.wire.invitation import Invitation

STDIN, VARIABLE = "-", "THINWIRE_INVITE"
MOST_CHARACTERS = 1000  # of standard input: an invitation has 101


@dataclass(frozen=True)
class Standing:
    """What came of it, as both ends show it. `again`: it had been so before."""

    name: str
    state: str
    fingerprint: str
    url: str
    pin: str
    again: bool = False

    def tell(self, home: Path | None, json: bool) -> None:
        """What it is now, and the line to paste next."""
        if json:
            say.document({key: value for key, value in vars(self).items() if key != "again"})
            return
        joined = "has joined already" if self.again else "has joined"
        say.line(f"{self.name} {joined}: {self.url}")
        say.line(f"key      {say.grouped(self.fingerprint)}")
        say.line(f"pin      {say.grouped(self.pin) if len(self.pin) == 64 else self.pin}")
        if self.state == "pending":
            say.line("state    waits to be approved: the aggregator's operator compares the key's fingerprint")
            say.line(f"         there: thinwire devices approve {self.name}")
        else:
            say.line(f"state    {self.state}")
        start = f"client start --task NAME=MODULE --name {self.name}"
        say.line(f"next     {again(start, home)}")
        say.line(f"         {again(f'client service install --name {self.name}', home)}    (once that works)")


def join(url: str, given: str | None, name: str, home: Path | None) -> Standing:
    """Join the aggregator at `url` once; a second time tells what is so already and uses nothing up."""
    from thinwire import __version__
    from thinwire.core.errors import Refused, UsageError
    from thinwire.core.home import client_home, find_home, hold
    from thinwire.flower import device_key
    from thinwire.flower.device.address import Address
    from thinwire.flower.device.joining import join as join_over
    from thinwire.flower.device.keys import KEY_FILE
    from thinwire.flower.device.trust import Trust
    from thinwire.flower.wire.signing import Signer

    invitation = read(given)
    if given not in (None, STDIN):
        say.note("note: users of this machine can see an invitation in a command line; - reads it from standard input")
    address = Address.parse(url if "://" in url else f"https://{url}")
    url = f"{'https' if address.tls else 'http'}://{address}"
    folder = client_home(find_home(home), name)
    with hold(folder / "lock", {"joining": url}):
        fresh = not (folder / KEY_FILE).exists()
        trust, key = Trust.load(folder), device_key(folder)
        if trust is not None:
            _require_same(trust, invitation, name, home)
            return Standing(name, _state(trust, key), Signer(key).fingerprint, trust.url, invitation.pin, again=True)
        versions = {"thinwire": __version__, "python": platform.python_version(), "machine": platform.machine()}
        try:
            got = join_over(url, invitation, key, name, versions)
        except (Refused, UsageError):
            if fresh:  # nobody has heard of this key, or nobody took it; after silence it stays, for it may be known
                (folder / KEY_FILE).unlink()
            raise
        got.trust.save(folder)
    return Standing(got.name, got.state, got.fingerprint, got.trust.url, invitation.pin)


def read(given: str | None) -> Invitation:
    """The invitation: as typed; for `-` or nothing from THINWIRE_INVITE, else for `-` from standard input."""
    from thinwire.core.errors import UsageError
    from thinwire.flower.wire.invitation import Invitation

    text = given if given not in (None, STDIN) else os.environ.get(VARIABLE)
    if text is None and given == STDIN:
        if sys.stdin.isatty():
            say.note("paste the invitation, then Enter:")
        text = sys.stdin.readline(MOST_CHARACTERS)
    if text is None:
        raise UsageError(
            "there is no invitation", why=f"it stands behind the URL, or in {VARIABLE}",
            hint="thinwire client join URL -    (and paste it), or ask the operator: thinwire devices invite",
        )  # fmt: skip
    return Invitation.parse(text)


def _state(trust: Trust, key: ec.EllipticCurvePrivateKey) -> str:
    """The row's, as far as it can be learned now."""
    from thinwire.core.errors import ThinwireError
    from thinwire.flower.device.asking import ask

    try:
        kind = ask(trust.url, trust, key).kind
    except ThinwireError as error:
        return f"could not be asked: {error.what}"
    return "approved" if kind == "ask" else kind


def _require_same(trust: Trust, invitation: Invitation, name: str, home: Path | None) -> None:
    from thinwire.core.errors import ThinwireError
    from thinwire.flower.wire.invitation import SYSTEM

    if invitation.pin not in (SYSTEM if trust.system else "", *trust.pins):
        raise ThinwireError(
            f"{name} has joined another aggregator already: {trust.url}", why="it has one key, which is known there",
            hint=f"another --name; or first: {again(f'client leave --name {name}', home)}",
        )  # fmt: skip
