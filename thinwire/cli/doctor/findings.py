"""What a doctor found: each thing that has to be right, whether it is, and what to do where it is not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from thinwire.cli import say
from thinwire.core.errors import ThinwireError

UNSEEN = "could not be looked at"


@dataclass(frozen=True)
class Finding:
    """`ok` None: it could not be looked at, because something before it failed. `try_`: what to do."""

    what: str
    ok: bool | None
    said: str
    try_: str = ""

    @property
    def word(self) -> str:
        return {True: "ok", False: "failed", None: "-"}[self.ok]


def found(what: str, look: Callable[[], Finding | str]) -> Finding:
    """What looking gave; a refusal or the system's own is a finding too."""
    try:
        said = look()
    except ThinwireError as error:
        return Finding(what, False, str(error), error.hint)
    except OSError as error:
        return Finding(what, False, error.strerror or str(error) or type(error).__name__)
    return Finding(what, True, said) if isinstance(said, str) else said


def unseen(what: str, why: str) -> Finding:
    return Finding(what, None, f"{UNSEEN}: {why}")


def tell(findings: Sequence[Finding], json: bool) -> int:
    """All of them, and the exit code: 0 when nothing failed."""
    failed = any(finding.ok is False for finding in findings)
    if json:
        rows = [{name.rstrip("_"): value for name, value in asdict(one).items()} for one in findings]
        say.document({"ok": not failed, "findings": rows})
        return int(failed)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        first, *more = finding.said.splitlines() or [""]
        say.line(f"{finding.word:<6}  {finding.what:<{width}}  {first}")
        for line in more:
            say.line(f"{'':<6}  {'':<{width}}  {line}")
        if finding.try_:
            say.line(f"{'':<6}  {'':<{width}}  try: {finding.try_}")
    if failed:
        print(f"{sum(one.ok is False for one in findings)} of {len(findings)} failed", file=sys.stderr, flush=True)
    return int(failed)
