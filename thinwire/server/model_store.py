"""Model versions are kept on disk: one file for each version, written once and sent to devices unchanged.

A file holds one identity frame for each segment, then a frame of float buffers if the model has any. The state of the
server optimizer is in `v000007.state` next to it, which never leaves the aggregator. Fixed tensors are the same in all
versions; they are in the file `fixed`.

Invariant: a file is durable before the event that names it is recorded, so the journal never names a missing file.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load, save

from thinwire.aggregation import read_model, write_model
from thinwire.aggregation.mean import pack_fixed, unpack_fixed
from thinwire.core.errors import BadPayload, DataLost
from thinwire.core.events import ModelStored, ShadowStored
from thinwire.core.layout import Layout
from thinwire.core.statedir import write_atomically
from thinwire.core.types import Fixed, Part, State, Vector

FIXED = "fixed"


@dataclass(frozen=True)
class Versions:
    """Holds the files `v000007.model` of one run in its folder."""

    folder: Path
    layout: Layout
    durable: bool = True  # False if nothing of the run outlives its process

    def path(self, version: int) -> Path:
        """Return the path of a version's file."""
        return self.folder / f"v{version:06d}.model"

    def write(
        self,
        version: int,
        params: Vector,
        buffers: Vector,
        counters: Mapping[str, int],
        at: float,
        state: State | None = None,
    ) -> ModelStored:
        """Make a version durable and return its event; `params` and `buffers` are the flat float32 vectors
        of the layout.
        """
        path, digest_of_state = self.path(version), ""
        if state:
            data = save(state)
            digest_of_state = hashlib.sha256(data).hexdigest()
            write_atomically(path.with_suffix(".state"), data)
        parts, digest = write_model(path, self.layout, params, buffers, self.durable)
        return ModelStored(
            at,
            version,
            digest,
            path.name,
            [(p.name, p.length, p.sha256) for p in parts],
            dict(counters),
            digest_of_state,
        )

    def read(self, stored: ModelStored | ShadowStored) -> tuple[Vector, Vector]:
        """Return (params, buffers) of a version; raise `DataLost` if its file is missing or differs from the record."""
        path = self.folder / stored.file
        try:
            params, buffers, digest = read_model(path, self.layout, parts_of(stored))
        except OSError as error:
            raise DataLost(
                f"model version {stored.version} cannot be read", why=str(error), hint="restore a backup"
            ) from error
        if digest != stored.digest:
            raise DataLost(
                f"model version {stored.version} is damaged",
                why=f"its digest is {digest[:12]}, recorded was {stored.digest[:12]}",
                hint="restore a backup, or start anew from an older version: [run] init",
            )
        return params, buffers

    def write_fixed(self, values: Fixed) -> None:
        """Write the fixed tensors for the exported file; without tensors write no file."""
        if data := pack_fixed(values):
            write_atomically(self.folder / FIXED, data)

    def read_fixed(self) -> Fixed:
        """Return the run's fixed tensors; raise `DataLost` if reading fails."""
        path = self.folder / FIXED
        try:
            return unpack_fixed(self.layout, path.read_bytes() if path.exists() else b"")
        except (OSError, BadPayload, SafetensorError) as error:
            raise DataLost(
                "the run's tensors that no training changes cannot be read",
                why=str(error),
                hint="restore a backup",
            ) from error

    def read_state(self, stored: ModelStored) -> State:
        """Return the server optimizer's state at a version, bit for bit; raise `DataLost` if reading fails."""
        if not stored.state:
            return {}
        path = (self.folder / stored.file).with_suffix(".state")
        try:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != stored.state:
                raise ValueError("its digest is not the one recorded")
            return {name: array.copy() for name, array in load(data).items()}
        except (OSError, ValueError, SafetensorError) as error:
            raise DataLost(
                f"what the server optimizer remembers at version {stored.version} cannot be read",
                why=str(error),
                hint='restore a backup, or start anew from this model: [run] init = "run:ID"',
            ) from error

    def prune(self, keep: Collection[int], sent: Collection[int] = (), changes: Collection[int] = ()) -> None:
        """Delete the files of all versions except models to `keep`, versions still `sent`, and logged `changes`."""
        kept, going, logged = ({self.path(v).stem for v in versions} for versions in (keep, sent, changes))
        wanted = {".model": kept | going, ".state": kept, ".shadow": going, ".change": going | logged}
        for path in self.folder.glob("v*.*"):
            if path.stem not in wanted.get(path.suffix, going):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()


def parts_of(stored: ModelStored | ShadowStored) -> tuple[Part, ...]:
    """Return the parts of a stored version."""
    return tuple(Part(name, length, sha256) for name, length, sha256 in stored.parts)
