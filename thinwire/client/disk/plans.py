"""Resolved plans that this device keeps, each under the digest that it computed itself.

An ask then carries 64 letters where it carried the plan. Law: a plan under a digest that is not its own is never
used: what a file holds is hashed when it is read, and a plan that comes in an ask is hashed as it came.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.client.disk.state import Write
from thinwire.client.failures import CannotAnswer
from thinwire.core.errors import ThinwireError
from thinwire.core.home import private_folder, write_atomically
from thinwire.core.json_bounds import BYTES_A_TOKEN, require_small
from thinwire.core.plan import canonical, digest_of
from thinwire.core.types import Ask

KEPT = 32
MOST_BYTES = 2**16  # of one plan, and its values are few; a larger one is used and not kept
DIGEST = re.compile(r"[0-9a-f]{64}")


class Plans:
    """In memory, and in `folder` where there is one, so that the next process knows them too."""

    def __init__(self, folder: Path | None = None, write: Write = write_atomically) -> None:
        self.folder, self._write = folder, write
        self._held: dict[str, dict[str, Any]] = {}  # least lately used first
        self._named: dict[str, str] = {}  # ask_id -> the digest that it named and that was not here
        for path in self._files():
            self._load(path)

    @property
    def digests(self) -> tuple[str, ...]:
        """What is held: a hello says it."""
        return tuple(self._held)

    def known(self, ask: Ask) -> Mapping[str, Any] | None:
        """The ask's plan where it is here or came with it; nothing is kept."""
        return self._held.get(ask.plan) if isinstance(ask.plan, str) else ask.plan

    def of(self, ask: Ask) -> Mapping[str, Any]:
        """The ask's plan, kept from now on; CannotAnswer("need-plan") where only its digest came and is not here."""
        if isinstance(ask.plan, str):
            if (plan := self._held.pop(ask.plan, None)) is None:
                self._await(ask.ask_id, ask.plan)
                raise CannotAnswer("need-plan", "the plan was sent by its digest only")
            self._held[ask.plan] = plan
            self._touch(ask.plan)
            return plan
        if not isinstance(ask.plan, Mapping):
            raise CannotAnswer("protocol", "the ask has neither a plan nor its digest")
        digest = digest_of(ask.plan)
        if self._named.get(ask.ask_id, digest) != digest:
            raise CannotAnswer("protocol", "the plan that came is not the one whose digest was sent before")
        self._keep(digest, ask.plan)
        return ask.plan

    def _await(self, ask_id: str, digest: str) -> None:
        """When the ask comes again with its plan, that is the plan it named."""
        if DIGEST.fullmatch(digest):
            self._named[ask_id] = digest
            while len(self._named) > KEPT:
                del self._named[next(iter(self._named))]

    def _keep(self, digest: str, plan: Mapping[str, Any]) -> None:
        """A disk that refuses costs a plan sent again, no more."""
        known = self._held.pop(digest, None)
        data = canonical(plan)
        if not _is_small(data):
            return
        self._held[digest] = dict(plan)
        if known is not None:
            self._touch(digest)
        elif self.folder is not None:
            with contextlib.suppress(ThinwireError):
                self._write(private_folder(self.folder) / f"{digest}.json", data)
        while len(self._held) > KEPT:
            self._forget(next(iter(self._held)))

    def _files(self) -> list[Path]:
        """Least lately used first."""
        if self.folder is None or not self.folder.is_dir():
            return []
        return sorted(self.folder.glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))

    def _load(self, path: Path) -> None:
        """A file that is not what its name says is thrown away."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
            plan = json.loads(data) if _is_small(data) else None
            if DIGEST.fullmatch(path.stem) and isinstance(plan, dict) and digest_of(plan) == path.stem:
                self._held[path.stem] = plan
                while len(self._held) > KEPT:
                    self._forget(next(iter(self._held)))
                return
        with contextlib.suppress(OSError):
            path.unlink()

    def _touch(self, digest: str) -> None:
        """Its file's time says when it was used last."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                os.utime(self.folder / f"{digest}.json")

    def _forget(self, digest: str) -> None:
        self._held.pop(digest, None)
        if self.folder is not None:
            with contextlib.suppress(OSError):
                (self.folder / f"{digest}.json").unlink()


def _is_small(data: bytes) -> bool:
    """Whether a plan's JSON, and what it is in memory, is little enough for KEPT of them."""
    try:
        require_small(data, MOST_BYTES // BYTES_A_TOKEN)
    except ValueError:
        return False
    return len(data) <= MOST_BYTES
