"""An invitation as text: which aggregator, by the hash of its CA's key, and the secret that lets one device in."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from thinwire.core.errors import UsageError

SYSTEM = "system"  # in the pin's place: the aggregator's certificate is one that machines trust already
SECRET_BYTES = 16
_TEXT = re.compile(r"tw1\.([0-9a-f]{64}|system)\.([0-9a-f]{32})")


@dataclass(frozen=True)
class Invitation:
    """`tw1.PIN.SECRET`. `pin`: SHA-256 (hex) over the CA's SubjectPublicKeyInfo, or `system`; `secret`: 128 bits, hex.

    Law: Invitation.parse(i.text()) == i.
    """

    pin: str
    secret: str

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """`UsageError`, which does not repeat the text, for anything that is no invitation; capitals do not matter."""
        found = _TEXT.fullmatch(text.strip().lower())
        if found is None:
            raise UsageError(
                "this is no invitation",
                why=f"one reads tw1.PIN.SECRET, of 101 letters (43 with the pin system), not {len(text.strip())}",
                hint="paste the whole line that thinwire devices invite printed",
            )
        return cls(found[1], found[2])

    @classmethod
    def draw(cls, pin: str) -> Invitation:
        """A fresh one."""
        return cls(pin, secrets.token_hex(SECRET_BYTES))

    def text(self) -> str:
        return f"tw1.{self.pin}.{self.secret}"
