"""Keep a device's own privacy ledger: each noised release in which its data took part, as a line of one file.

The lines form a hash chain: a line is JSON with the hash of the line before it and its own. The client writes the line
before anything of its assignment leaves the device, and never removes it, also not at `thinwire client leave`. When the
reply to an assignment is on disk, another line records that (`mark_answered`). If the assignment is delivered again
before that, it has its line already. If it is delivered again later and its reply is lost, the device makes another
reply, which is another release and another line. Only the ledger decides this: an aggregator can make a device forget
the state of a run, by a run of the same name.

A data set has the name that its owner gave it (`--dataset`), and a path (`client/booking.py`). Two tasks on one folder
share what was spent. So do the runs before and after the owner named a folder, or moved a named one: the client writes
a line that names the data set (`note_dataset`) before it books anything under the new name or path.

Invariant: a ledger that is damaged, or that the disk refuses, books nothing, and its device takes part in no private
run. Only the end of the file may be unfinished: a line that is cut short was never acknowledged, and the next line
replaces it. A device does not notice a disk that loses the end of a synced file. The aggregator notices it by the
counts of earlier hellos.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from thinwire.client.booking import Booking, DataSet, same_datasets
from thinwire.core.errors import DataLost, PlanError, Refused, ThinwireError
from thinwire.core.fleet import MAX_EARLIER_KEYS, MAX_POPULATIONS, population_key
from thinwire.core.plan import RunPlan
from thinwire.core.plan_names import named_model
from thinwire.core.statedir import disk_error, sync_path
from thinwire.core.types import Assignment

FILE = "privacy.jsonl"
ANSWERED = "answered"  # key of a line: the number of the booking whose reply is on disk


class DeviceLedger:
    """The ledger of one client, in its folder. Any thread may call it.

    `key` is the fingerprint of the device's present key.

    Invariant: when `book` returns, the line is durable; when it raises, it is not counted, and whatever the disk has of
    it is replaced by the next line.
    """

    def __init__(self, folder: Path, key: str = "") -> None:
        self.path, self.key = folder / FILE, key
        self._lock = threading.RLock()
        self._bookings: list[Booking] = []
        self._named = set[DataSet]()  # data sets of all lines
        self._lines = 0
        self._open: dict[tuple[object, ...], int] = {}  # id of a booking whose reply was not made -> its line's number
        self._head, self.damage = "", ""
        self._length, self._gap = 0, b""  # bytes of whole lines, and what stands between them and the next one
        self._read()

    @property
    def bookings(self) -> tuple[Booking, ...]:
        """Return all lines, oldest first; of a damaged ledger those before the damage."""
        with self._lock:
            return tuple(self._bookings)

    @property
    def head(self) -> str:
        """Return the hash of the last line, which stands for all lines; "" for an empty ledger."""
        return self._head

    def has(self, booking: Booking) -> bool:
        """Return True if this is booked and not answered; time and key of the booking do not matter."""
        return booking.id in self._open

    def sequence_of(self, identity: str, assignment: str) -> int:
        """Return the sequence of the last booking of an assignment; 0 if it has none."""
        with self._lock:
            of = (one for one in reversed(self._bookings) if (one.identity, one.assignment) == (identity, assignment))
            return next((one.sequence for one in of), 0)

    def same_datasets(self, dataset: DataSet) -> set[DataSet]:
        """Return this data set and those of the lines that count for it."""
        with self._lock:
            return same_datasets(dataset, self._named)

    def spent(self, dataset: DataSet) -> dict[str, int]:
        """Return how many of each release a data set took part in, in any population and run; raise if damaged.

        The release of the oldest line is first: it decides how all are added up.
        """
        with self._lock:
            self._require_whole()
            same = self.same_datasets(dataset)
            return dict(Counter(one.release for one in self._bookings if one.dataset in same))

    def participations(self, dataset: DataSet, population: str) -> int:
        """Return in how many releases of a population a data set took part; raise if damaged."""
        with self._lock:
            self._require_whole()
            same = self.same_datasets(dataset)
            return sum(one.population == population and one.dataset in same for one in self._bookings)

    def rounds_of(self, identity: str, dataset: DataSet) -> int:
        """Return in how many releases of a run a data set took part."""
        with self._lock:
            same = self.same_datasets(dataset)
            return sum(one.identity == identity and one.dataset in same for one in self._bookings)

    def has_other_data(self, identity: str, origin: str, dataset: DataSet) -> bool:
        """Return True if another data set took part in a run, or in the run `origin` with whose model it begins.

        The state that the device keeps of these runs was trained on the other data set: local buffers, personal layers,
        a residual. A release of it would be booked for this data set, and not for the other one.
        """
        with self._lock:
            same = self.same_datasets(dataset)
            of = (one for one in self._bookings if one.identity == identity or (origin and one.run == origin))
            return any(one.dataset not in same for one in of)

    def nearest_round(self, booking: Booking) -> int | None:
        """Return the round of the same run nearest to that of a booking, in which its data set took part.

        The booking's own line does not count, unless it was answered. None if the data set took part in no other round.
        """
        with self._lock:
            own, same = booking.id if self.has(booking) else None, self.same_datasets(booking.dataset)
            mine = (one for one in self._bookings if one.identity == booking.identity and one.id != own)
            found = {one.round for one in mine if one.dataset in same}
        return min(found, key=lambda number: abs(number - booking.round), default=None)

    def report(self) -> tuple[dict[str, int], str, tuple[str, ...]]:
        """Return what a hello reports: releases by `population_key`, the last line's hash, and the ledger's other keys.

        A device that joins again has a new key, and its data are the same. By its earlier keys the aggregator finds
        what they have spent. A damaged ledger reports nothing.
        """
        with self._lock:
            if self.damage:
                return {}, "", ()
            counted = Counter(one.population for one in self._bookings)
            return {population_key(name): counted[name] for name in counted}, self._head, self._earlier_keys()

    def _earlier_keys(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.key for one in reversed(self._bookings) if one.key not in ("", self.key)))

    def require_room(self, population: str) -> None:
        """Raise `Refused` if a hello could not report a booking of this population besides all that it has."""
        with self._lock:
            held = {population, *(one.population for one in self._bookings)}
            for count, most, what in (
                (len(held), MAX_POPULATIONS, "populations"),
                (len(self._earlier_keys()), MAX_EARLIER_KEYS, "earlier keys of this device"),
            ):
                if count > most:
                    raise Refused(
                        f"this device's privacy ledger would have {count} {what}, and may have {most}",
                        why="an aggregator that did not learn of all of them would count too little",
                        hint="thinwire client privacy lists them; other populations need another device",
                    )

    def note_dataset(self, dataset: DataSet) -> None:
        """Record durably the name and path of a data set, if lines have one of the two and no line has both.

        So its lines still count for it when its name or its path changes next. A damaged ledger records nothing.
        """
        with self._lock:
            if not self.damage and dataset not in self._named and self.same_datasets(dataset) != {dataset}:
                self._head = self._add(asdict(dataset))
                self._named.add(dataset)

    def book(self, booking: Booking) -> None:
        """Add a line durably, once for each assignment; raise `DataLost` if the ledger is damaged or the disk full.

        Raise `Refused` as `require_room` does.
        """
        with self._lock:
            self._require_whole()
            if self.has(booking):
                return
            self.require_room(booking.population)
            booking = replace(booking, key=self.key)
            self._apply(booking, self._add(asdict(booking)))

    def mark_answered(self, identity: str, assignment: str) -> None:
        """Record durably that the reply to an assignment is on disk: a later reply to it is booked separately.

        The client calls this after the commit of the reply and before it is sent. The next process calls it again for
        each reply on disk. Without a booking it does nothing. Raise `DataLost` if the ledger is damaged or the disk
        full: then the reply must not be sent.
        """
        with self._lock:
            for key in [key for key in self._open if key[:2] == (identity, assignment)]:
                self._require_whole()
                self._head = self._add({ANSWERED: self._open[key]})
                del self._open[key]

    def _add(self, said: Mapping[str, object]) -> str:
        """Add a line durably, and return its hash."""
        line, head = _line(said, self._lines + 1, self._head)
        self._append(self._gap + line + b"\n")
        self._length, self._gap = self._length + len(self._gap) + len(line) + 1, b""
        self._lines += 1
        return head

    def _append(self, data: bytes) -> None:
        """Write behind the last acknowledged line, and sync."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if os.fstat(descriptor).st_size < self._length:
                    self.damage = f"{self.path} is shorter than what was written into it"
                    self._require_whole()
                os.ftruncate(descriptor, self._length)
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:], self._length + done)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if not self._length:
                sync_path(self.path.parent)
        except OSError as error:
            raise disk_error(error, self.path) from error

    def _apply(self, booking: Booking, head: str) -> None:
        self._bookings.append(booking)
        self._named.add(booking.dataset)
        self._open[booking.id] = self._lines
        self._head = head

    def _read_line(self, line: bytes) -> None:
        """Read one line; raise ValueError or TypeError if it does not follow from the line before it."""
        said = {name: value for name, value in json.loads(line).items() if name not in ("n", "before", "hash")}
        kind = DataSet if said.keys() == {"name", "data"} else Booking
        made = None if said.keys() == {ANSWERED} else kind(**said)
        same, head = _line(said if made is None else asdict(made), self._lines + 1, self._head)
        if line != same:
            raise ValueError("it does not follow from the line before it")
        self._lines += 1
        if isinstance(made, Booking):
            self._apply(made, head)
            return
        self._head = head
        if made is not None:
            self._named.add(made)
        self._open = {key: number for key, number in self._open.items() if number != said.get(ANSWERED)}

    def _read(self) -> None:
        """Read the file, and check its chain; it is synced first, because a killed process may not have done that."""
        try:
            sync_path(self.path)
            *lines, rest = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            self.damage = f"{self.path} is not readable: {error.strerror or error}"
            return
        if _is_whole(rest):  # only its newline is missing; it counts, also if it was never acknowledged
            lines.append(rest)
            self._gap = b"\n"
        for number, line in enumerate(lines, 1):
            try:
                self._read_line(line)
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                self.damage = f"line {number} of {self.path} is damaged: {error}"
                return
        self._length = sum(map(len, lines)) + len(lines) - len(self._gap)

    def _require_whole(self) -> None:
        if self.damage:
            raise DataLost(
                self.damage,
                why="what this device's data have spent is not known, so it takes part in nothing private",
                hint="bring the file back from a copy; without one, this data set is best not used again",
            )


@dataclass(frozen=True)
class Prospect:
    """The privacy that an assignment would spend: its `booking`, and the data set's epsilon after it.

    `participations` are the data set's in this population without this one. All are None if the assignment spends
    nothing. `unknown` is the reason if it is not known what it spends.
    """

    booking: Booking | None = None
    epsilon: float | None = None
    participations: int | None = None
    unknown: str = ""


def composed_epsilon(spent: Mapping[str, int], most: float, delta: float) -> float:
    """Return the epsilon at `delta` of releases, by their JSON, to compare with `most`, an owner's `max_epsilon`."""
    from thinwire.privacy.accounting import filtered_epsilon  # a device without private runs loads no accountant

    return filtered_epsilon(spent, most, delta)


def require_readable(release: str) -> None:
    """Raise `DataLost` if this is not the JSON of a release: what is booked can be read again."""
    from thinwire.privacy.accounting import releases_of

    releases_of({release: 1})


def no_release(assignment: Assignment, plan: RunPlan) -> tuple[str, str]:
    """Raise `PlanError`: this version does not compute what a plan's releases are."""
    del assignment
    raise PlanError(f'this version cannot compute what mode = "{plan.privacy.mode}" spends')


@dataclass(frozen=True)
class Account:
    """Judges and books private assignments by the device's own ledger, not by what a plan claims.

    `dataset` returns the data set of a task. `release` returns population and release (JSON) of a training assignment,
    and raises `ThinwireError` if the device cannot compute them. `epsilon` adds releases up, the first one first, for a
    largest epsilon and a delta.
    """

    ledger: DeviceLedger
    dataset: Callable[[str], DataSet]
    release: Callable[[Assignment, RunPlan], tuple[str, str]] = no_release
    epsilon: Callable[[Mapping[str, int], float, float], float] = composed_epsilon

    def prospect(
        self, assignment: Assignment, plan: RunPlan, sequence: int, at: float, limit: tuple[float, float] | None
    ) -> Prospect:
        """Return what the assignment would spend; epsilon only if a `limit` is given: the largest epsilon, and delta.

        Only training spends: a first model and an evaluation have no noise, so a private plan's are declined. A run in
        which the data took part as often as its plan allows, spends nothing more: its epsilon counts on that.
        """
        from thinwire.privacy.noise_plan import participations_of  # a device without private runs loads no accountant

        if plan.privacy.mode == "off" or assignment.kind != "train":
            return Prospect()
        try:
            dataset = self.dataset(assignment.task)
            spent = Counter(self.ledger.spent(dataset))
            population, release = self.release(assignment, plan)
            require_readable(release)
            self.ledger.require_room(population)
            origin = (named_model(plan.run.init) or ("", ""))[0]
            if plan.privacy.mode != "example" and self.ledger.has_other_data(assignment.identity, origin, dataset):
                return Prospect(unknown="other data of this device took part in this run, and it keeps some of it")
            booking = Booking(
                at, dataset.name, dataset.data, population, release, assignment.run, assignment.identity,
                assignment.round, assignment.assignment_id, sequence,
            )  # fmt: skip
            is_booked = self.ledger.has(booking)
            most, here = participations_of(plan), self.ledger.rounds_of(assignment.identity, dataset) - is_booked
            if here >= most:
                return Prospect(unknown=f"its data took part in {here} rounds of this run, the plan allows {most}")
            near, apart = self.ledger.nearest_round(booking), plan.privacy.min_separation
            if near is not None and apart > 1 and abs(near - booking.round) < apart:
                return Prospect(unknown=f"its data took part in round {near}, the plan keeps {apart} rounds apart")
            took = self.ledger.participations(dataset, population) - is_booked
            spent[release] += not is_booked
            return Prospect(booking, None if limit is None else self.epsilon(spent, *limit), took)
        except ThinwireError as error:
            return Prospect(unknown=error.what)
        except (ArithmeticError, ValueError) as error:  # a plan that nobody checked may have any number
            return Prospect(unknown=f"what was spent here is not computable: {error}")


def _is_whole(text: bytes) -> bool:
    """Return True if the text begins with a JSON value that is not cut short."""
    try:
        json.JSONDecoder().raw_decode(text.decode("latin-1"))
    except (ValueError, RecursionError):
        return False
    return True


def _line(said: Mapping[str, object], number: int, before: str) -> tuple[bytes, str]:
    """Return a line without its newline, and its hash, which covers all lines before it."""
    held = {"n": number, "before": before, **said}
    head = hashlib.sha256(json.dumps(held, separators=(",", ":")).encode()).hexdigest()
    return json.dumps({**held, "hash": head}, separators=(",", ":")).encode(), head
