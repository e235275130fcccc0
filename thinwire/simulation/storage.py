"""Storage of a simulation: replies and client state in memory instead of files, and on disk to resume after a kill.

`InMemorySpool` keeps small replies in memory, and `spool_reply` checks each part of a file against its digest, as the
device API does. `CachedRunFolder` keeps a client's state in memory until the client is evicted, and `LruPolicy` chooses
the clients to evict. `SharedFolder` is for clients that several processes train.

Resume: after `kill -9` the same call of `simulate` continues the run, to the same bits as if it had never been killed.
The aggregator restarts as always: it replays the journal and sends outstanding assignments again (server/run.py). A
client resumes as a killed device does: each commit of its run state is on disk, and a repeated assignment gets the same
reply again (client/outbox.py). This module adds the rest: it finds the unfinished run of a call, the time on the run's
clock, and the client that replied last.

A simulation with secure aggregation keeps secrets in memory only. Its open round is aborted, and the run goes on with
the next one. Personal layers and `context.state` outlive the run, as on a device: each client's folder keeps them until
the run is deleted. A run that begins with the model of this one begins with them, if its clients have the same data.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from thinwire.client.personal_files import FOLDER as PERSONAL
from thinwire.client.personal_files import save_values
from thinwire.client.run_state import STATE, ClientRunState, RunFolder, run_path, write_unsynced
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import BadPayload
from thinwire.core.events import ENDED, ClientFailed, Event, UpdateAccepted, UpdateDropped
from thinwire.core.fleet import Spool
from thinwire.core.part_file import damaged_part
from thinwire.core.plan import RunPlan
from thinwire.core.plan_names import named_model
from thinwire.core.statedir import (
    AggregatorHome,
    dead_owner,
    disk_error,
    private_folder,
    private_opener,
    write_atomically,
)
from thinwire.core.types import Arrived, ReplyHeader, Transfer, UpdateId
from thinwire.simulation.checks import require_dead_owner
from thinwire.store import FileSpool, Store

BLOCK = 1 << 20


def spool_reply(
    spool: Spool, reply: ReplyHeader, bundle: Path | bytes | None, transfer: Callable[[], Transfer]
) -> ReplyHeader:
    """Store a reply in the spool and return its header; check each part against its digest, as the device API does.

    `transfer` is called once the spool has all parts. Raise `BadPayload` for a part that does not match its digest, or
    that is missing. Of bytes that stay in memory only the length is checked, because this program has just hashed them.
    """
    if isinstance(spool, InMemorySpool) and spool.has_room(reply):
        body = bundle.read_bytes() if isinstance(bundle, Path) else bundle or b""
        if isinstance(bundle, Path) and (part := damaged_part(io.BytesIO(body), reply.parts)) is not None:
            raise BadPayload(f"{part.name} is not what its digest says")
        if len(body) < reply.payload_bytes:
            raise BadPayload(f"a reply of {len(body)} bytes, whose parts have {reply.payload_bytes}")
        header = reply.arrived(transfer())
        spool.add(header, body)
        return header
    draft = spool.draft(reply.update_id)
    try:
        with open(draft, "wb", opener=private_opener) as out:
            _copy(bundle, out, reply)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    header = reply.arrived(transfer())
    spool.commit(draft, header)
    return header


def _copy(bundle: Path | bytes | None, out: BinaryIO, header: ReplyHeader) -> None:
    """Copy the parts of a reply, and check each one against its digest."""
    if bundle is None:
        if header.parts:
            raise BadPayload("a reply whose parts are missing")
        return
    with bundle.open("rb") if isinstance(bundle, Path) else io.BytesIO(bundle) as source:
        for part in header.parts:
            digest, left = hashlib.sha256(), part.length
            while left and (block := source.read(min(left, BLOCK))):
                digest.update(block)
                out.write(block)
                left -= len(block)
            if left or digest.hexdigest() != part.sha256:
                raise BadPayload(f"{part.name} is not what its digest says")


MAX_SPOOL_BYTES = 64 << 20  # of the replies that wait in memory until they are aggregated


class InMemorySpool(FileSpool):
    """Stores replies in memory up to `max_bytes` with `add`, and as files like its base class.

    Replies in memory are opened, listed and deleted like all others.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_SPOOL_BYTES) -> None:
        super().__init__(folder, durable=False)
        self._max_bytes, self._bytes = max_bytes, 0
        self._bodies: dict[UpdateId, tuple[ReplyHeader, bytes]] = {}

    def has_room(self, header: ReplyHeader) -> bool:
        """Return True if there is room in memory for this reply."""
        return self._bytes + header.payload_bytes <= self._max_bytes

    def add(self, header: ReplyHeader, body: bytes) -> None:
        """Store a reply in memory, unless the spool already has a reply of this update."""
        if self.header(header.update_id) is None:  # only the first one counts
            self._bodies[header.update_id] = header, body
            self._bytes += len(body)

    def header(self, update_id: UpdateId) -> ReplyHeader | None:
        """Return the header of a reply; None if the spool does not have it."""
        held = self._bodies.get(update_id)
        return held[0] if held else super().header(update_id)

    def headers(self) -> Sequence[ReplyHeader]:
        return [*super().headers(), *(header for header, _ in self._bodies.values())]

    def open(self, update_id: UpdateId) -> Iterator[Arrived]:
        if update_id in self._bodies:
            return _parts(*self._bodies[update_id])
        return super().open(update_id)

    def delete(self, update_id: UpdateId) -> None:
        if update_id in self._bodies:
            self._bytes -= len(self._bodies.pop(update_id)[1])
        else:
            super().delete(update_id)


def _parts(header: ReplyHeader, body: bytes) -> Iterator[Arrived]:
    at = 0
    for part in header.parts:
        yield memoryview(body)[at : at + part.length]
        at += part.length


class CachedRunFolder(RunFolder):
    """Caches a client's run state and its encoded updates in memory; `write_back` writes them to disk at an eviction.

    With `is_new`, the disk has nothing of this client, so `load` does not read it. To create and remove a thousand
    folders takes longer than a round.

    Invariant: after `write_back` the next folder object without `is_new` loads the state that was committed last.
    """

    def __init__(self, own: Path, run: str, is_new: bool = False) -> None:
        super().__init__(run_path(own, run), write_unsynced)
        self._is_new = self.is_only_run = is_new  # a simulation is one run
        self._bodies: dict[str, bytes] = {}  # file -> an encoded update that is not on disk yet
        self._unwritten: ClientRunState | None = None  # committed, but not on disk yet

    @property
    def cached_bytes(self) -> int:
        """Return the bytes of the encoded updates in memory."""
        return sum(len(body) for body in self._bodies.values())

    def load(self) -> tuple[ClientRunState, list[str]]:
        return (ClientRunState(), []) if self._is_new else super().load()

    def body(self, path: Path | None) -> Path | bytes | None:
        """Return the encoded update of this file, from memory if it is there."""
        return self._bodies.get(path.name, path) if path else None

    def commit(self, state: ClientRunState, parts: Mapping[str, bytes] | None = None) -> None:
        bodies = {**self._bodies, **(parts or {})}
        self._bodies = {entry.file: bodies[entry.file] for entry in state.outbox if entry.file in bodies}
        self._unwritten = state

    def write_back(self) -> None:
        """Write the state that was committed last to disk, unless it is there already."""
        if self._unwritten is not None:
            super().commit(self._unwritten, self._bodies)
            self._unwritten, self._bodies = None, {}


class LruPolicy:
    """Chooses the clients to evict, least recently used first, so that the others stay below a number of bytes."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[int, int] = OrderedDict()  # client -> bytes, least recently used first
        self._total = 0

    def use(self, index: int, size: int) -> None:
        """Record that client `index` was used, and that it now has `size` bytes."""
        self.drop(index)
        self._sizes[index] = size
        self._total += size

    def drop(self, index: int) -> None:
        """Forget client `index`."""
        self._total -= self._sizes.pop(index, 0)

    def excess(self, limit: int) -> Iterator[int]:
        """Yield and forget clients until the others have at most `limit` bytes; the latest one always stays."""
        while self._total > limit and len(self._sizes) > 1:
            index = next(iter(self._sizes))
            self.drop(index)
            yield index


PRIVATE = 0o600


class SharedFolder(RunFolder):
    """Holds the run state of a client that several processes serve in turn: each commit is on disk for the next
    process.

    Invariant: if a process is killed at any moment, `load` returns the complete state before or after a commit. A power
    failure may leave another state, unless the folder is `durable`.
    """

    def __init__(self, folder: Path, durable: bool = False) -> None:
        super().__init__(folder, write_atomically if durable else write_by_swap)

    def load(self) -> tuple[ClientRunState, list[str]]:
        path = self.folder / STATE
        if not path.exists() and _read(draft := draft_of(path)) is not None:  # else a first commit was killed
            draft.rename(path)
        return super().load()


def write_by_swap(path: Path, data: bytes) -> None:
    """Replace a file without syncing it: write a draft, remove the old file, then rename the draft.

    A rename over the old file would be one step, after which ext4 writes the new file to disk at once: that takes
    longer than all other work of a small client.
    """
    draft = draft_of(path)
    try:
        draft.touch(PRIVATE)
        draft.write_bytes(data)
        path.unlink(missing_ok=True)
        draft.rename(path)
    except OSError as error:
        raise disk_error(error, path) from error


def draft_of(path: Path) -> Path:
    """Return the name under which a new file is written before it replaces `path`."""
    return path.with_name(f".{path.name}.draft")


def shared_folder(folder: Path, run: str, durable: bool = False) -> SharedFolder:
    """Return the shared folder of a run in a client's own folder."""
    return SharedFolder(run_path(folder, run), durable)


@dataclass(frozen=True)
class ResumableSimulation:
    """A simulation in a state directory that can be resumed, with the id of its unfinished run if there is one.

    `about` describes what decides the result besides the plan: clients and their data, split, seed, seconds of a step,
    layout of the model. The task's code is not compared, because a notebook changes it all the time.
    """

    home: AggregatorHome
    about: Mapping[str, Any]
    unfinished: str = ""  # id of the run

    @classmethod
    def find(cls, store: Store, home: AggregatorHome, plan: RunPlan, about: Mapping[str, Any]) -> Self:
        """Return the simulation of this plan and description; raise `Refused` if another process runs it.

        The search cleans up the folders of simulations that have ended, which their processes may have left.
        """
        for row in reversed(list(store.runs())):
            owner, is_over = home.owner(row.run_id), row.source == "sim" and row.status in ENDED
            if is_over and (not owner.exists() or dead_owner(owner) is not None):  # it may have been killed before it
                keep_personal_values(home.simulation(row.run_id).parent, row.run_id)
            if row.source != "sim" or row.status in (*ENDED, "preparing"):
                continue
            if dict(row.plan) != plan.to_json() or _read(home.simulation(row.run_id)) != about:
                continue
            require_dead_owner(home, row.run_id)
            return cls(home, about, row.run_id)
        return cls(home, about)

    def folder(self, run_id: str) -> Path:
        """Return the folder of a run's clients and spool; create it with its description if it is missing."""
        about = self.home.simulation(run_id)
        private_folder(about.parent)
        if not about.exists():
            write_atomically(about, json.dumps(dict(self.about)).encode())
        return about.parent

    def clients(self, run_id: str) -> Path:
        """Return the folder with a folder for each client."""
        return self.folder(run_id) / CLIENTS

    def spool(self, run_id: str) -> FileSpool:
        """Return the spool, with the replies that are not aggregated yet."""
        return FileSpool(self.folder(run_id) / SPOOL, self.home.durable)

    def inherit_personal_values(self, run_id: str, init: str) -> None:
        """Give each client its personal values of run ID if this run has `[run] init = "run:ID"`.

        Clients of a simulation with other data or another split get none. A second call changes nothing.
        """
        origin = named_model(init)
        if origin is None or _data_facts(_read(self.home.simulation(origin[0]))) != _data_facts(self.about):
            return
        for path in (self.home.simulation(origin[0]).parent / CLIENTS).glob(f"*/{PERSONAL}/{origin[0]}.safetensors"):
            own = private_folder(private_folder(self.clients(run_id) / path.parts[-3]) / PERSONAL)
            if not (own / path.name).exists():
                os.link(path, own / path.name)


CLIENTS, SPOOL = "clients", "spool"  # in the folder of a simulation


def _data_facts(about: Any) -> Mapping[str, Any] | None:
    """Return what decides which data each client has, from the description of a simulation; None without one."""
    return {name: about.get(name) for name in ("clients", "split", "seed", "data")} if about else None


def keep_personal_values(folder: Path, run_id: str) -> None:
    """Remove the files of an ended simulation, except the personal layers and the `context.state` of its clients.

    If no client has such values, the whole folder is removed. Invariant: a second call completes a killed one.
    """
    clients, spool = folder / CLIENTS, folder / SPOOL
    if clients.exists() and not spool.exists():
        return
    keeps = False
    for own in clients.glob("*/"):
        path, kept = run_path(own, run_id), own / PERSONAL / f"{run_id}.safetensors"
        if any(path.glob("personal-*")) or any(path.glob("context-*")):
            state, damaged = RunFolder(path).load()
            if not (damaged and kept.exists()):  # else a killed call had saved the values, and removed some files
                save_values(own, run_id, state)
        keeps = _remove_all_but(own, kept) or keeps
    for unneeded in [spool] if keeps else [clients, folder]:
        shutil.rmtree(unneeded, ignore_errors=True)


def _remove_all_but(own: Path, kept: Path) -> bool:
    """Remove all of a client's folder but one file; return False if there is no such file."""
    if not kept.exists():
        shutil.rmtree(own, ignore_errors=True)
        return False
    for path in (*own.iterdir(), *kept.parent.iterdir()):
        if path.is_dir() and path != kept.parent:
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file() and path != kept:
            path.unlink(missing_ok=True)
    return True


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def resume_point(store: Store, spool: FileSpool, run_id: str) -> tuple[VirtualClock, str]:
    """Return the clock with which a run resumes, and the client that replied last ("" if none has).

    The clock begins now, or after the last event, which may lie in the future. It begins at a whole second, because
    fractions would round times differently in each process. The client is the sender of the newest spooled reply that
    no event has decided about, or else of the reply that was decided last.
    """
    decided, last, last_at = set[str](), "", 0.0
    for _, event in store.events(run_id):
        last_at = max(last_at, event.at)
        if device := _replied(event):
            last = device
            decided.add(getattr(event, "update_id", ""))
    waiting = [
        header for header in spool.headers() if header.update_id.run == run_id and str(header.update_id) not in decided
    ]
    newest = max(waiting, key=lambda header: header.transfer.arrived_at if header.transfer else 0.0, default=None)
    clock = VirtualClock(origin=float(max(int(time.time()), math.ceil(last_at))))
    return clock, newest.update_id.device if newest else last


def _replied(event: Event) -> str:
    """Return the client whose reply an event decides about, "" for other events."""
    return event.device if isinstance(event, UpdateAccepted | UpdateDropped | ClientFailed) else ""
