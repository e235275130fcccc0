"""Keep the state of one run on a device, and commit it to disk as a whole or not at all.

`runs/RUN/state.json` is the commit. It names the files that count (residual, local buffers, parts of each reply) and
their SHA-256. These files are written and synced before it and removed after it. Invariant: a crash at any moment
leaves the state before or after a commit, complete.

`RunFolder` writes each commit at once. `WriteBehindRunFolder` may wait until `save` (`[local] durability = "exit"`),
for slow SD cards. While state is unsaved, `held.json` stands for it on disk, with a sequence that no reply has reached.
After a kill, the unsaved residual, the personal values and the replies without an outcome are lost. The older state on
disk is discarded, because it would count updates twice. The next process numbers its replies above the stored sequence,
so that no id is used again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from thinwire.core.errors import BadPayload, DataLost
from thinwire.core.part_file import damaged_part
from thinwire.core.serialization import reply_from_json, reply_to_json
from thinwire.core.statedir import disk_error, private_folder, private_opener, require_room, sync_path, write_atomically
from thinwire.core.types import ReplyHeader, Vector

FORMAT = 3  # lower formats are from before the first release
STATE = "state.json"
NOT_KNOWN = -1  # a value of `references_from`
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # a run's id names a directory
Write = Callable[[Path, bytes], None]
Arrays = Mapping[str, NDArray[Any]]
VECTORS = ("residual", "momentum", "buffers", "replica", "own")
GROUPS = ("codec_arrays", "pending", "personal", "context")  # named arrays
FILES = (*VECTORS, *GROUPS)
_vectors, _groups = operator.attrgetter(*VECTORS), operator.attrgetter(*GROUPS)
PLAIN = {
    "sequence": int, "layout_digest": str, "encoded_at": int, "replica_version": int, "references_from": int,
    "lost": str, "counted_at": int, "identity": str,
}  # fmt: skip


def no_bytes() -> int:
    """Return 0, the bytes of the disk that stay free by default."""
    return 0


@dataclass(frozen=True)
class Entry:
    """A reply that was made: its header (`header`), the round of its assignment, and the file of its parts.

    `file` is "" without parts. `first` is True if the parts are the first model of a run and no update. `is_overdue` is
    True if an assignment beyond the limit brought no outcome; it is not stored.
    """

    header: ReplyHeader
    round: int
    file: str = ""
    first: bool = False
    is_overdue: bool = False

    @property
    def expects_outcome(self) -> bool:
        """Return True if an outcome will come: the reply has an update, and the device must know its outcome."""
        return bool(self.header.parts) and not self.first


@dataclass(frozen=True)
class ClientRunState:
    """The state of one run; frozen, so each step returns a new one.

    Vectors are flat float32. None means all zero, or for `buffers` the shared ones.

    - `residual` is the error feedback's residual, or the EF21 reference if the plan uses EF21.
    - `codec_arrays` are the codec's own arrays, named SEGMENT/NAME.
    - `encoded_at` is the round of the last encode, `noised` is True if that update had the noise of mode example.
    - `replica` is the replica, at version `replica_version`: the model to which the aggregator sends updates. It is
      kept if the downlink is compressed, and is never written to.
    - `own` is the control variate of SCAFFOLD or FedDyn: the sum of what this device sent of it
      (aggregation/control_variates.py).
    - `counted_at` is the first model version that contains any of `own`, 0 if none does.
    - `references_from` is the round of the assignment with which the EF21 reference or `own` began, or of which some
      was `lost`. It is `NOT_KNOWN` until an assignment came after a loss.
    - `lost` is the reason why this state began at zero, as in `ReplyHeader`. An update that reports it clears it.
    - `pending` are raw updates that no model version contains yet (overlap, client/outbox.py).
    - `personal` are the values of the personal layers by name, empty before the first training (client/personal.py).
    - `context` are the arrays that a task's own train() left in `context.state`: they move as the personal layers do.
    - `outbox` holds the replies that expect an outcome or were not delivered, `counters` the integer buffers.
    """

    sequence: int = 0
    layout_digest: str = ""
    residual: Vector | None = None
    buffers: Vector | None = None  # with [local] buffers = "local"
    counters: Mapping[str, int] = field(default_factory=dict)
    outbox: tuple[Entry, ...] = ()
    momentum: Vector | None = None
    codec_arrays: Arrays = field(default_factory=dict)
    encoded_at: int = 0
    noised: bool = False
    references_from: int = 0
    replica: Vector | None = None
    replica_version: int = 0
    own: Vector | None = None
    counted_at: int = 0
    lost: str = ""
    pending: Mapping[str, Vector] = field(default_factory=dict)
    identity: str = ""  # of the run, from its assignments
    personal: Arrays = field(default_factory=dict)
    context: Arrays = field(default_factory=dict)

    def counted_in(self, version: int) -> bool:
        """Return True if the aggregator's mean at `version` contains any of `own`."""
        return 0 < self.counted_at <= version

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays in memory."""
        arrays = [*_vectors(self), *(array for group in _groups(self) for array in group.values())]
        return sum([array.nbytes for array in arrays if array is not None])


class RunFolder:
    """The files of one run.

    `write` writes a file durably; simulations replace it by one that does not sync. `min_free` returns the bytes of the
    disk that stay free. A commit that enlarges the folder and would leave less raises `NotWritten`. A commit that makes
    the folder smaller is always written.
    """

    def __init__(self, folder: Path, write: Write = write_atomically, min_free: Callable[[], int] = no_bytes) -> None:
        self.folder, self._write, self._min_free = folder, write, min_free
        self.is_only_run = False  # True if its client has no state of other runs, so that none is searched
        self._kept: dict[str, tuple[Arrays, str]] = {}  # file -> its arrays and its digest

    def path(self, entry: Entry) -> Path | None:
        """Return the file of a reply's parts, None if it has no parts."""
        return self.folder / entry.file if entry.file else None

    def body(self, path: Path | None) -> Path | bytes | None:
        """Return the parts of a reply whose file is `path`: the file, unless a subclass has the bytes."""
        return path

    def load(self) -> tuple[ClientRunState, list[str]]:
        """Return the last commit, and a sentence for each part of it that is unreadable: that part begins at zero."""
        path, said = self.folder / STATE, list[str]()
        try:
            raw = json.loads(path.read_bytes())
            self._require_format(raw)
            outbox = [self._entry(row) for row in raw["outbox"]]
            plain: dict[str, Any] = {name: kind(raw[name]) for name, kind in PLAIN.items()}
            state = ClientRunState(**plain, noised=bool(raw.get("noised")), counters=dict(raw["counters"]))
        except FileNotFoundError:
            return ClientRunState(), []
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, BadPayload) as error:
            return ClientRunState(lost="damaged", references_from=NOT_KNOWN), [
                f"the state of {self.folder.name} is not readable ({type(error).__name__}); it begins again"
            ]
        found: dict[str, Arrays] = {}
        for name in FILES:
            if raw.get(name):
                try:
                    found[name] = self._read(raw[name])
                except (OSError, ValueError, KeyError, TypeError) as error:
                    said.append(f"the {name} of {self.folder.name} is not readable ({error}); it begins at zero")
        whole = [entry for entry in outbox if self._whole(entry)]
        if len(whole) < len(outbox):  # what these replies left in the state cannot be taken back if they are dropped
            said.append(f"{len(outbox) - len(whole)} replies of {self.folder.name} are not on disk any more")
        state = replace(_with_arrays(state, found), lost="damaged" if said else state.lost)
        return replace(state, outbox=tuple(whole)), said

    def _require_format(self, raw: Mapping[str, Any]) -> None:
        """Raise `DataLost` for a state of another format: none of it is read."""
        if raw.get("format", FORMAT) != FORMAT:
            raise DataLost(
                f"the state of {self.folder.name} has another format than this client reads",
                why=f"{self.folder / STATE} has format {raw['format']!r}, this program reads {FORMAT}",
                hint=f"install the thinwire that wrote it, or remove {self.folder}",
            )

    def commit(self, state: ClientRunState, parts: Mapping[str, bytes] | None = None) -> None:
        """Make the state durable, with the bytes of new outbox files.

        Raises `DataLost` if the disk refuses: the last commit stays as it was.
        """
        self.require_room(state, parts or {})
        private_folder(self.folder)
        for file, data in (parts or {}).items():
            self._write(self.folder / file, data)
        raw: dict[str, Any] = {
            "format": FORMAT, **{name: getattr(state, name) for name in PLAIN}, "counters": dict(state.counters),
            "noised": state.noised, **dict.fromkeys(FILES),
            "outbox": [
                {"header": reply_to_json(e.header), "round": e.round, "file": e.file, "first": e.first}
                for e in state.outbox
            ],
        }  # fmt: skip
        for name, arrays in _arrays(state).items():
            raw[name] = self._file(name, state.sequence, arrays)
        self._write(self.folder / STATE, json.dumps(raw, separators=(",", ":")).encode())
        self._tidy({STATE, *(e.file for e in state.outbox), *(raw[n]["file"] for n in FILES if raw[n])})

    def commit_smaller(self, state: ClientRunState) -> None:
        """Make durable a state that has fewer replies than the last one."""
        self.commit(state)

    def require_room(self, state: ClientRunState, parts: Mapping[str, bytes]) -> None:
        """Raise `NotWritten` if a state that needs more bytes than the last one does not fit; write nothing.

        Files that the commit replaces stay until it is done, so there must be room for every new file.
        """
        if not (min_free := self._min_free()):
            return
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        held = {path.name: path.stat().st_size for path in self.folder.iterdir()} if there == self.folder else {}
        if sent_bytes(state) + state.nbytes > sum(held.values()):
            arrays = [arrays for name, arrays in _arrays(state).items() if self._stored(name, arrays) is None]
            more = sum(array.nbytes for group in arrays for array in group.values())
            more += sum(len(data) for file, data in parts.items() if file not in held)
            require_room(there, more, min_free)

    def _stored(self, name: str, arrays: Arrays) -> dict[str, str] | None:
        """Return the row of the file that already holds these same array objects, None if there is none."""
        for file, (held, digest) in self._kept.items():
            if file.startswith(name) and held.keys() == arrays.keys() and all(held[k] is arrays[k] for k in held):
                return {"file": file, "sha256": digest}
        return None

    def _file(self, name: str, sequence: int, arrays: Arrays) -> dict[str, str]:
        """Write arrays to a new file, unless a file holds them already."""
        if (stored := self._stored(name, arrays)) is not None:
            return stored
        names = (f"{name}-{sequence}-{n}.safetensors" for n in itertools.count())
        file = next(name for name in names if not (self.folder / name).exists())  # never overwrite a file that counts
        data = save(dict(arrays))
        digest = hashlib.sha256(data).hexdigest()
        self._write(self.folder / file, data)
        self._kept = {f: kept for f, kept in self._kept.items() if not f.startswith(name)}
        self._kept[file] = (arrays, digest)
        return {"file": file, "sha256": digest}

    def _read(self, row: Mapping[str, str]) -> Arrays:
        name = _plain(row["file"])
        data = (self.folder / name).read_bytes()
        if hashlib.sha256(data).hexdigest() != row["sha256"]:
            raise ValueError("it is damaged")
        out = {key: np.array(array) for key, array in load(data).items()}
        self._kept[name] = (out, row["sha256"])
        return out

    def _entry(self, row: Mapping[str, Any]) -> Entry:
        header = reply_from_json(row["header"])
        if not isinstance(header, ReplyHeader):
            raise TypeError("a failure is not kept")
        return Entry(header, int(row["round"]), _plain(row["file"]) if row["file"] else "", bool(row["first"]))

    def _whole(self, entry: Entry) -> bool:
        if (path := self.path(entry)) is None:
            return True
        try:
            with path.open("rb") as file:
                return damaged_part(file, entry.header.parts) is None and not file.read(1)
        except OSError:
            return False

    def _tidy(self, keep: set[str]) -> None:
        """Remove files that no commit names; a file that an error leaves does no harm."""
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path.name not in keep:
                    path.unlink(missing_ok=True)


def sent_bytes(state: ClientRunState) -> int:
    """Return the bytes of all outbox files together."""
    return sum(entry.header.payload_bytes for entry in state.outbox if entry.file)


def _arrays(state: ClientRunState) -> dict[str, Arrays]:
    """Return the arrays of a state that are kept in files of their own, by file name."""
    vectors = {name: getattr(state, name) for name in VECTORS}
    found: dict[str, Arrays] = {name: {name: vector} for name, vector in vectors.items() if vector is not None}
    return {**found, **{name: arrays for name, arrays in zip(GROUPS, _groups(state), strict=True) if arrays}}


def _with_arrays(state: ClientRunState, found: Mapping[str, Arrays]) -> ClientRunState:
    """Return the state with the arrays that its files contain."""
    vectors: dict[str, Any] = {name: found.get(name, {}).get(name) for name in VECTORS}
    groups: dict[str, Any] = {name: found.get(name, {}) for name in GROUPS}
    return replace(state, **vectors, **groups)


def _plain(file: str) -> str:
    """Return a file name; raise ValueError if it could lead to another directory."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", file):
        raise ValueError(f"{file!r} is no file of this folder")
    return file


def write_unsynced(path: Path, data: bytes) -> None:
    """Write a file that need not outlive this process: `write_atomically` without its syncs."""
    try:
        with open(path, "wb", opener=private_opener) as file:
            file.write(data)
    except OSError as error:
        raise disk_error(error, path) from error


def run_path(folder: Path, run: str) -> Path:
    """Return the folder of a run whose id came from outside; `DataLost` for an id that no run can have."""
    if not RUN_ID.fullmatch(run) or ".." in run:
        raise DataLost(f"no run can be called {run[:80]!r}")
    return folder.joinpath("runs", run)


MARK = "held.json"
SEQUENCES_A_MARK = 64  # that one mark allows: one durable write of the mark for 64 rounds


class WriteBehindRunFolder(RunFolder):
    """A run folder that writes behind: `hold` keeps a state in memory until `save`.

    Invariant: after a kill, `load` returns what was saved last if `hold` was not called since. Otherwise it
    returns zero state with a sequence above the mark.
    """

    def __init__(self, folder: Path, write: Write = write_atomically, min_free: Callable[[], int] = no_bytes) -> None:
        super().__init__(folder, write, min_free)
        self._held: ClientRunState | None = None
        self._below = -1  # highest sequence that the mark on disk allows

    def load(self) -> tuple[ClientRunState, list[str]]:
        """Return what was saved last; after a kill with unsaved state, zero state with a sequence above the mark."""
        state, said = super().load()
        try:
            below = int(json.loads((self.folder / MARK).read_bytes())["below"])
        except FileNotFoundError:
            return state, said
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            # The aggregator's reply to hello still reports the highest sequence that it has seen.
            below = state.sequence + SEQUENCES_A_MARK
        lost = f"{self.folder.name}: what was not yet sent of it is lost: this client ended before it could save it"
        return ClientRunState(max(below, state.sequence), lost="unsaved", references_from=NOT_KNOWN), [lost]

    def hold(self, state: ClientRunState, parts: Mapping[str, bytes] | None = None) -> None:
        """Keep the state in memory until `save`. The parts of replies are written at once, but not synced."""
        self.require_room(state, parts or {})  # counts what `save` will write, too
        private_folder(self.folder)
        if state.sequence > self._below:
            below = state.sequence + SEQUENCES_A_MARK
            self._write(self.folder / MARK, json.dumps({"below": below}).encode())
            self._below = below
        for file, data in (parts or {}).items():
            write_unsynced(self.folder / file, data)
        unneeded = _files(self._held.outbox if self._held else ()) - _files(state.outbox)
        for file in unneeded:
            with contextlib.suppress(OSError):
                (self.folder / file).unlink()
        self._held = state

    def commit_smaller(self, state: ClientRunState) -> None:
        """Keep a state with fewer replies: in memory if unsaved state is there, else on disk."""
        if self._held is None:
            self.commit(state)
        else:
            self.hold(state)

    def save(self) -> None:
        """Make durable what is in memory. Raises `DataLost` if the disk refuses: the state stays in memory."""
        if self._held is not None:
            files = _files(self._held.outbox)
            self.commit(self._held, {file: (self.folder / file).read_bytes() for file in files})

    def commit(self, state: ClientRunState, parts: Mapping[str, bytes] | None = None) -> None:
        """Make the state durable and remove the mark."""
        super().commit(state, parts)  # removes every file that is not part of the state: the mark too
        self._held, self._below = None, -1
        with contextlib.suppress(OSError):
            sync_path(self.folder)  # else the mark may be back after a power failure, and the state be discarded


def write_behind_folder(
    folder: Path, run: str, write: Write = write_atomically, min_free: Callable[[], int] = no_bytes
) -> WriteBehindRunFolder:
    """Return the write-behind folder of a run whose id came from outside."""
    return WriteBehindRunFolder(run_path(folder, run), write, min_free)


def _files(outbox: tuple[Entry, ...]) -> set[str]:
    return {entry.file for entry in outbox if entry.file}
