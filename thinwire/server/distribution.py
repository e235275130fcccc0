"""Who holds a run's plan, so that an ask need only name it, and what becomes of an ask whose plan was not there.

A device that has lost the plan says `need-plan` and gets the same ask again with the whole plan: the round waits, and
nothing counts against the device. Nothing of this is journalled: what an ask carries changes no answer, and after a
restart the devices' hellos say what they hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.aggregation.downlink import BUFFERS, FULL, Downlink, way, write_model
from thinwire.core.events import ModelStored, ShadowStored
from thinwire.core.fleet import Arrival, Envelope, Hello, NodeJoined
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import write_atomically
from thinwire.core.types import Failure, Part, ReplyHead
from thinwire.server.aggregator import Model
from thinwire.server.model_store import Versions, parts_of
from thinwire.server.state.run_state import Past


class Holders:
    """Which devices hold the plan of one run.

    A device holds the plan when its hello says so, or when it answered an ask that carried it.

    Law: an ask is sent again at most once, and only to the device that it went to. A device has `most` asks at once.
    """

    def __init__(self, plan: Mapping[str, Any], digest: str, most: int) -> None:
        self.plan, self.digest = plan, digest
        self._sure: dict[str, bool] = {}  # device -> what was learned since its hello, against which this counts
        self._last = LastAsked(most)

    def plan_for(self, device: str, hello: Hello | None) -> Mapping[str, Any] | str:
        """The plan as an ask to this device carries it."""
        said = hello is not None and self.digest in hello.plans
        return self.digest if self._sure.get(device, said) else self.plan

    def asked(self, envelopes: Sequence[Envelope]) -> None:
        self._last.remember(envelopes)

    def sent(self, device: str, ask_id: str) -> bool:
        """Whether an ask went to this device since this process began, and has not failed: then it is delivered again
        by itself.
        """
        return self._last.find(device, ask_id) is not None

    def take(self, arrival: Arrival, anew: bool) -> Envelope | None:
        """What to send again for this; None: it is nothing of ours. `anew`: a hello that says something else."""
        match arrival:
            case NodeJoined(device):
                if anew:
                    self._sure.pop(device, None)  # another process: its hello knows best
            case ReplyHead():
                if (last := self._last.find(arrival.update_id.device, arrival.ask_id)) is not None:
                    self._sure[last.device] = True
            case Failure("need-plan", _, ask_id, device):
                self._sure[device] = False
                last = self._last.find(device, ask_id)
                if last is not None and isinstance(last.ask.plan, str):
                    again = replace(last, ask=replace(last.ask, plan=self.plan))
                    self._last.remember([again])
                    return again
                self._last.forget(device, ask_id)
            case Failure(_, _, ask_id, device):
                self._last.forget(device, ask_id)
        return None


# What each device was asked last, to be sent again.


class LastAsked:
    """The last `most` asks of each device: as many as it may hold at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._asks: dict[str, dict[str, Envelope]] = {}  # device -> ask_id -> ask

    def remember(self, envelopes: Iterable[Envelope]) -> None:
        for envelope in envelopes:
            asks = self._asks.setdefault(envelope.device, {})
            asks[envelope.ask.ask_id] = envelope
            while len(asks) > self._most:
                del asks[next(iter(asks))]

    def forget(self, device: str, ask_id: str) -> None:
        self._asks.get(device, {}).pop(ask_id, None)

    def find(self, device: str, ask_id: str) -> Envelope | None:
        """The ask, if it is one of those that went to this device."""
        return self._asks.get(device, {}).get(ask_id)


# What each device is sent of the model: the changes since the version that it holds, or all of it.
#
# What a device holds is what its last answer was made from. That may be wrong: a disk was lost, a backup restored.
# Then the device says `base-mismatch`, since the digest that an ask names does not come out, and gets the same ask
# again with the whole model: the round waits, and nothing counts against the device.


Row = tuple[str, int, str]  # a part's name, length and SHA-256


@dataclass(frozen=True)
class Parcel:
    """Parts for a device, and the pieces of files (name, start, length) that they are; `name`: the file of all."""

    parts: tuple[Part, ...]
    pieces: tuple[tuple[str, int, int], ...]
    name: str

    @property
    def size(self) -> int:
        return sum(part.length for part in self.parts)


class Sending:
    """What the devices of one run are sent of its model.

    Law: an ask is sent again in full at most once, and only to the device that it went to.
    """

    def __init__(self, plan: RunPlan, versions: Versions, past: Past, model: Model) -> None:
        self.plan, self.versions, self.past, self.model = plan, versions, past, model
        self.downlink: Downlink | None = None
        if plan.downlink.compressed:
            shadow = versions.read(past.bases.shadow)[0] if past.bases.shadow else model.params
            self.downlink = Downlink(model.layout, plan.downlink.codec, shadow, past.version, plan.run.seed)
        self._lost: set[str] = set()  # devices that did not hold what their last answer was made from
        self._last = LastAsked(past.delay + 1)

    def publish(self, version: int, at: float) -> list[ShadowStored]:
        """Make what devices hold of a new version durable; nothing where that is the model itself."""
        if self.downlink is None:
            return []
        every = self.plan.downlink.full_every
        news = self.downlink.publish(self.model.params, full=bool(every) and version % every == 0)
        assert news.version == version
        if not news.changes:
            return []
        path = self.versions.path(version)
        change, shadow = path.with_suffix(".change"), path.with_suffix(".shadow")
        write_atomically(change, b"".join(news.changes))
        rows = [(f"{version}/{i}", len(c), hashlib.sha256(c).hexdigest()) for i, c in enumerate(news.changes)]
        parts, digest = write_model(shadow, self.model.layout, self.downlink.shadow, self.model.buffers)
        assert digest == news.digest
        full = [(part.name, part.length, part.sha256) for part in parts]
        return [ShadowStored(at, version, digest, shadow.name, full, change.name, rows)]

    def parcel(self, device: str, but: str = "") -> Parcel:
        """What brings this device to the newest version, the shorter way.

        What it was sent ahead it will hold by then: all but this ask (`but`) itself.
        """
        base = self.past.bases.newest
        if self.downlink is not None and device not in self._lost:
            held = self.past.will_hold(device, but) if self.past.delay else self.past.bases.held.get(device)
            log = {v: self._logged(v) for v in range((held or 0) + 1, base.version + 1)}
            sizes = {version: _size(rows) for version, (_, rows) in log.items() if rows}
            if (versions := way(held, base.version, sizes, _size(base.parts))) is not None:
                return _changes(base, [log[version] for version in versions], held)
        return self.whole(base)

    def whole(self, base: ModelStored | ShadowStored) -> Parcel:
        """A version as its file holds it."""
        return Parcel(parts_of(base), ((base.file, 0, _size(base.parts)),), base.file)

    def _logged(self, version: int) -> tuple[str, Sequence[Row]]:
        """The file of a change and its parts; no parts where it is not logged any more."""
        stored = self.past.bases.changes.get(version)
        if stored is None or version <= self.past.version - self.plan.downlink.log_rounds:
            return "", ()
        return stored.change, stored.change_parts if (self.versions.folder / stored.change).exists() else ()

    def bundle(self, parcel: Parcel) -> Path | None:
        """The file in which a parcel's parts stand one after the other; None for one without parts."""
        if not parcel.parts:
            return None
        path = self.versions.folder / parcel.name
        made = len(parcel.pieces) == 1 and parcel.pieces[0][0] == parcel.name
        if not made and not (path.exists() and path.stat().st_size == parcel.size):
            write_atomically(path, b"".join(self._read(*piece) for piece in parcel.pieces))
        return path

    def _read(self, file: str, start: int, length: int) -> bytes:
        with (self.versions.folder / file).open("rb") as source:
            source.seek(start)
            return source.read(length)

    def asked(self, envelopes: Sequence[Envelope]) -> None:
        self._last.remember(envelopes)

    def take(self, arrival: Arrival) -> Envelope | None:
        """The ask to send again in full, where this says that changes led nowhere; None: it is nothing of ours."""
        if not isinstance(arrival, Failure) or arrival.kind != "base-mismatch":
            return None
        last = self._last.find(arrival.device, arrival.ask_id)
        if last is None or _is_full(last.ask.parts):
            return None
        self._lost.add(arrival.device)
        if last.ask.base_version == self.past.version:
            parcel = self.parcel(arrival.device)
        elif self.past.delay and arrival.ask_id in self.past.owed.of(arrival.device):
            parcel = self.whole(self.past.bases.of(last.ask.round))  # an ask that went ahead: its round is still open
        else:
            return None  # its round is over, and so is what it could be told to start from: the next ask is in full
        return replace(last, ask=replace(last.ask, parts=parcel.parts), bundle=self.bundle(parcel))

    def holds(self, device: str) -> None:
        """An answer of a device says what it holds."""
        self._lost.discard(device)


def _changes(base: ModelStored | ShadowStored, log: Sequence[tuple[str, Sequence[Row]]], held: int | None) -> Parcel:
    """Changes one after the other, then the buffers, of which there are none but the newest."""
    rows, pieces = [row for _, rows in log for row in rows], [(file, 0, _size(rows)) for file, rows in log]
    if base.parts[-1][0] == BUFFERS:
        rows.append(base.parts[-1])
        pieces.append((base.file, _size(base.parts[:-1]), base.parts[-1][1]))
    name = pieces[0][0] if len(pieces) == 1 and log else f"v{base.version:06d}.from{held or 0:06d}"
    return Parcel(tuple(Part(*row) for row in rows), tuple(pieces), name)


def _size(rows: Sequence[Row]) -> int:
    return sum(length for _, length, _ in rows)


def _is_full(parts: Sequence[Part]) -> bool:
    return any(part.name.startswith(f"{FULL}/") for part in parts)
