"""Invitations as text: what an operator hands to a device's owner, and how the device reads it.

The device API writes its addresses and its pin to `tls/invite.json` when it starts. Command line and dashboard make the
text of an invitation and the command to type from them, and from a secret that `store/one_time_secrets.py` made.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from thinwire.core.errors import NotFound, UsageError
from thinwire.core.start_options import reachable_command

SYSTEM = "system"  # in the pin's place: machines trust the aggregator's certificate already
LENGTHS = (101, 43)  # letters of an invitation, the second with `system` for its pin
_TEXT = re.compile(r"tw1\.([0-9a-f]{64}|system)\.([0-9a-f]{32})")


@dataclass(frozen=True)
class Invitation:
    """An invitation as text, `tw1.PIN.SECRET`: it identifies the aggregator, and its secret enrolls one device.

    `pin` is the SHA-256 (hex) of the CA's SubjectPublicKeyInfo, or `system`. `secret` is 128 bits in hex.

    Invariant: Invitation.parse(i.text()) == i.
    """

    pin: str
    secret: str

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Read an invitation in either case; raise `UsageError`, which does not repeat the text, if it is invalid."""
        found = _TEXT.fullmatch(text.strip().lower())
        if found is None:
            count = len(text.strip())
            wrong = "one of its letters is wrong" if count in LENGTHS else f"this has {count}"
            raise UsageError(
                "this is no invitation",
                why=f"one reads tw1.PIN.SECRET, of 101 letters (43 with the pin system); {wrong}",
                hint="paste the whole line that thinwire devices invite printed",
            )
        return cls(found[1], found[2])

    def text(self) -> str:
        """Return the invitation's text."""
        return f"tw1.{self.pin}.{self.secret}"


COLUMNS: Final = ("id", "name", "url", "invitation", "command", "expires_at")
INVITE: Final = "invite.json"  # in the folder tls of the aggregator's
_PIN = re.compile(r"[0-9a-f]{64}|system")


@dataclass(frozen=True)
class InviteAddress:
    """The URLs and the pin of the device API, as the aggregator's last start wrote them."""

    pin: str
    urls: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> InviteAddress:
        """Read them in the aggregator's folder.

        Raise `NotFound` if the device API has never listened on an address for other machines.
        """
        try:
            said = json.loads((folder / "tls" / INVITE).read_bytes())
            place = cls(str(said["pin"]), tuple(str(url) for url in said["urls"]))
        except (OSError, ValueError, KeyError, TypeError):
            place = cls("", ())
        if not _PIN.fullmatch(place.pin) or not place.urls:
            raise NotFound(
                "there is no device API to invite to yet",
                why="an invitation names its address and certificate, and it has listened on this machine only",
                hint=reachable_command(folder),
            )
        return place

    def row(self, number: int, name: str, secret: str, expires_at: float) -> dict[str, Any]:
        """Return an invitation by the names of `COLUMNS`.

        The device reads the secret from standard input, so that no list of processes shows it.
        """
        command = f"thinwire client join {self.urls[0]} -" + (f" --name {name}" if name else "")
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires_at))
        values = (number, name, self.urls[0], Invitation(self.pin, secret).text(), command, moment)
        return dict(zip(COLUMNS, values, strict=True))
