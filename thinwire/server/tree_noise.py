"""The noise of tree aggregation (DP-FTRL) in a run, and the stored keys by which a later round draws it again.

A round adds to the model the noise of the new prefix of its tree, less that of the last prefix that was released
(`privacy/tree_aggregation.py`). So noise that is in the model is drawn again when it is taken off. Each node has a key
of its own, `StoredKey`. The file `.tree-keys` in the run's folder has those of the nodes of the last prefix.

Invariants, also after a crash anywhere:

- A key is durable before anything that has its noise is written.
- One key is for one released sum. A round that is made again, because a crash came before its commit, gets new keys, as
  a sum of a run without trees gets new noise. So no two sums with the same noise exist, not even in a hidden file.
- The keys of a prefix that was released repeat their noise exactly, in this process or in another one.
- Without the keys, or with those of another sampler, a new tree begins, and the noise of the last prefix stays in the
  model. That costs no more privacy, because the cost of a participation is that of any tree of at most so many rounds.

Whoever has this file and the model, has the sum of the updates of some rounds without noise. So the file has mode 0600
and is in no backup (its name begins with a dot). A key is deleted when no next round takes its noise off: with the next
prefix, when a tree is complete, and at the end of the run. A file system may keep the blocks of a deleted file.

A state directory that is set back together with its keys, as by a snapshot of a machine, goes on in the same tree: what
it releases then are other nodes than those of the rounds that it lost. They have new keys, but the updates of earlier
rounds are in both, and are booked for one. A restored backup has no keys, so this does not happen there. A run ends,
with its keys, as soon as a device that took part in a lost round reports that (`store/privacy_ledger.py`).
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from thinwire.aggregation.private_lattice import CHUNK
from thinwire.core.errors import NotFound
from thinwire.core.events import ENDED
from thinwire.core.statedir import sync_path, write_atomically
from thinwire.privacy.secret_rng import StoredKey
from thinwire.privacy.tree_aggregation import nodes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from thinwire.core.statedir import AggregatorHome
    from thinwire.privacy.noise_plan import NoisePlan
    from thinwire.store import Store

KEYS = ".tree-keys"


def erase_keys(folder: Path) -> None:
    """Delete the keys in a run's folder, and what a killed process left of a file of them."""
    if found := [*folder.glob(KEYS), *folder.glob(f".{KEYS}.*")]:
        for path in found:
            path.unlink(missing_ok=True)
        sync_path(folder)


def erase_ended(store: Store, home: AggregatorHome) -> None:
    """Delete the keys of runs that ended without their process: it was killed, or a person stopped the run."""
    for folder in {path.parent for path in (home.root / "runs").glob(f"*/{KEYS}")}:
        with contextlib.suppress(NotFound):  # a folder of no run is not ours
            if store.run(folder.name).status in ENDED:
                erase_keys(folder)


@dataclass(frozen=True)
class StoredTree:
    """Holds the first round of a tree and the keys of its nodes, by the place at which a node ends."""

    first: int
    keys: Mapping[int, StoredKey] = field(default_factory=dict)

    def place(self, number: int) -> int:
        """Return the place of a round in this tree; 0 if the round was before it."""
        return max(0, number - self.first + 1)


class TreeNoise:
    """Draws the noise of each round of a run with `mechanism = "tree"`, in the run's folder.

    `length` is the most rounds of a tree. The sampler is made when it is first needed.
    """

    def __init__(self, folder: Path, noise: NoisePlan, length: int) -> None:
        self._path, self._noise, self._length = folder / KEYS, noise, length

    def draw(self, number: int, last: int, out: NDArray[np.int32]) -> None:
        """Overwrite `out` with the noise that round `number` adds to its sum of integers.

        `last` is the last round that made a step, 0 before the first one. The keys are durable when this returns; raise
        `NotWritten` or `DataLost` if the disk refuses them.
        """
        tree = self._tree(number, last)
        old, new = nodes(tree.place(last)), nodes(tree.place(number))
        added = {place: StoredKey.made() for place in new if place not in old}
        self._write(StoredTree(tree.first, {place: tree.keys[place] for place in old} | added))
        streams = [(1, key.stream()) for key in added.values()]
        streams += [(-1, tree.keys[place].stream()) for place in old if place not in new]
        part = np.empty(min(CHUNK, out.size), np.int32)  # CHUNK is a multiple of the sampler's: chunks change no draw
        for start in range(0, out.size, CHUNK):
            here = out[start : start + CHUNK]
            here[:] = 0
            for sign, stream in streams:
                self._noise.sampler.fill(part[: here.size], stream)
                here += sign * part[: here.size]

    def settle(self, last: int) -> None:
        """Delete the keys that no round after `last` needs, once the step of round `last` is committed."""
        tree = self._read()
        kept = {key: tree.keys[key] for key in nodes(tree.place(last)) if key in tree.keys} if tree else {}
        if tree is None or not kept or tree.place(last) >= self._length:
            erase_keys(self._path.parent)
        elif kept.keys() != tree.keys.keys():
            self._write(StoredTree(tree.first, kept))

    def _tree(self, number: int, last: int) -> StoredTree:
        """Return the tree of a round: the stored one, or a new one that begins with the round."""
        tree = self._read()
        if tree is None or not 0 < tree.place(last) <= tree.place(number) - 1 < self._length:
            return StoredTree(number)
        return tree if set(nodes(tree.place(last))) <= tree.keys.keys() else StoredTree(number)

    def _read(self) -> StoredTree | None:
        """Return what is stored; None without a file that this sampler's noise can be drawn from."""
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            found = json.loads(self._path.read_bytes())
            if found["sampler"] == self._noise.sampler.digest:
                keys = {int(place): StoredKey.read(text) for place, text in found["keys"].items()}
                return StoredTree(int(found["first"]), keys)
        return None

    def _write(self, tree: StoredTree) -> None:
        keys = {str(place): key.write() for place, key in tree.keys.items()}
        said = {"first": tree.first, "sampler": self._noise.sampler.digest, "keys": keys}
        write_atomically(self._path, json.dumps(said).encode())
