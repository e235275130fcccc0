"""Deletes a run that is over, as a person commanded, or because it is older than the operator wants to keep.

The command is a row of `store.commands` first, so a deletion that was killed is completed by the next start of the
aggregator, or by the same command again. The order of `deletion_steps` lets no reader find a row without its file:

1. The store marks the run as deleted, and journals by whom. From then on nobody reads it, and its id stays taken.
2. Its rows go, in short transactions.
3. Its files go: models, server optimizer states, downlink bundles, messages of secure rounds and keys of noise (all in
   the run's folder), its replies in the spool, those that were set aside included, and the clients of a simulation that
   outlived its process.

Devices drop what they keep of the run when they learn that it is over. The run's row stays for this: a device that was
offline learns it at its next registration. `Retention` gives such commands itself, for runs that ended more than
`keep_days` days ago.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from thinwire.core.clock import Clock
from thinwire.core.errors import DataLost, Refused
from thinwire.core.events import ENDED, RunStatusChanged
from thinwire.core.run_events import DeletionPostponed
from thinwire.core.statedir import AggregatorHome, sync_path
from thinwire.server.run_end import close_undriven
from thinwire.store import RunRow, Store
from thinwire.store.spool import UNREADABLE

DAY_S = 86_400.0
RETENTION_CHECK_S = 3600.0  # period of the check for runs and records that are too old
KEEP_DAYS = "keep_days"  # who deletes by age, in the audit log and in `deleted_by`


class Retention:
    """Deletes runs and records of devices that are older than the operator wants to keep.

    Age is counted by the aggregator's clock. After a step of that clock ahead it deletes nothing before the next look,
    because a clock that was set wrongly is soon set back, and nothing brings a deleted run back. At its first look it
    compares the clock with the time of the last look that deleted: after a reboot the clock may be wrong.

    Invariant: a look that was postponed does not move that time. So each start with a wrong clock postpones again. A
    process deletes by a clock that is ahead only after it has reported the postponement for an hour.

    Runs are deleted by commands in the store, so a deletion that was killed is completed by the next start. A run's
    sums by device follow at the first look after its own deletion.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        keep_days: int,
        on_postponed: Callable[[DeletionPostponed], None] = lambda event: None,
    ) -> None:
        self._store, self._clock, self._keep_days, self._on_postponed = store, clock, keep_days, on_postponed
        self._checked_at, self._checked_wall = -math.inf, -math.inf
        self._left: Iterator[None] = iter(())

    def step(self) -> None:
        """Do the next short step: look once in a while, then delete in one transaction a call."""
        if self._clock.now() - self._checked_at >= RETENTION_CHECK_S:
            since, wall = self._clock.now() - self._checked_at, self._clock.wall()
            if not (first := math.isinf(since)):
                ahead_s, most_s = wall - self._checked_wall - since, RETENTION_CHECK_S
            else:
                ahead_s, most_s = wall - (self._store.believed_at() or wall), DAY_S
            self._checked_at, self._checked_wall = self._clock.now(), wall
            if ahead_s > most_s:
                if first:  # what the journal says of other events follows the wrong clock from now on
                    self._store.record_believed(wall - ahead_s)
                self._store.record_own(event := DeletionPostponed(wall, ahead_s))
                self._on_postponed(event)
                return
            self._store.record_believed(wall)
            before = wall - self._keep_days * DAY_S
            self._left = self._store.delete_expired(before)
            known = {one.run_id for one in self._store.commands.pending() if one.kind == "delete-run"}
            for run_id in self._store.expired_runs(before):
                if run_id not in known:
                    self._store.commands.add("delete-run", run_id, who=KEEP_DAYS)
        next(self._left, None)


def require_deletable(row: RunRow, with_queued: bool) -> None:
    """Raise `Refused` unless a run is over or, if `with_queued`, waits in the queue and has opened no round."""
    if row.status in ENDED or (with_queued and is_unbegun(row)):
        return
    if is_unbegun(row):
        raise Refused(
            f"{row.run_id} is queued, and not over",
            why="deleting it also takes it out of the queue",
            hint=f"thinwire runs delete {row.run_id} --yes",
        )
    raise Refused(
        f"{row.run_id} is {row.status}",
        why="only a run that is over can be deleted: devices work on this one",
        hint=f"thinwire runs stop {row.run_id}, then delete it",
    )


def is_unbegun(row: RunRow) -> bool:
    """Return True if a run waits in the queue and was never started."""
    return row.status == "queued" and row.started_at is None and row.source == "devices"


def deletion_steps(
    store: Store, home: AggregatorHome, run_id: str, who: str, drop_uploads: Callable[[str], None] = lambda run_id: None
) -> Iterator[None]:
    """Delete a run, or complete a deletion that was killed, and yield between the steps, which are short.

    A run in the queue is stopped first. `drop_uploads` tells a running device API to close the run's unfinished
    uploads. Raise `Refused` for a run that is not over, and `DataLost` if the disk refuses to delete a file: the run is
    marked then, and the rest can be repeated.
    """
    if store.deleted_run(run_id) is None and is_unbegun(store.run(run_id)):
        said = "taken out of the queue by a person, who deleted it"
        close_undriven(store, run_id, RunStatusChanged(time.time(), "stopped", said, 10))
    store.mark_deleted(run_id, who)
    yield
    yield from store.delete_rows(run_id)
    drop_uploads(run_id)
    places = [folder / run_id for folder in (home.root / "runs", home.root / "spool", home.root / "spool" / UNREADABLE)]
    for folder in (*places, home.simulation(run_id).parent):
        remove_folder(folder, home.durable)
        yield


def delete_run(store: Store, home: AggregatorHome, run_id: str, who: str) -> None:
    """Delete a run at once, as `deletion_steps` does step by step; for a process beside which no aggregator works."""
    for _ in deletion_steps(store, home, run_id, who):
        pass


def remove_folder(folder: Path, durable: bool = True) -> None:
    """Remove a folder with all that is in it; a missing one is no error, and a link is never followed."""
    try:
        if folder.is_symlink():
            folder.unlink()
        elif folder.is_dir():
            shutil.rmtree(folder)
        else:
            return
        if durable:
            sync_path(folder.parent)
    except FileNotFoundError:  # another process is deleting it, too
        return
    except OSError as error:
        raise DataLost(
            f"cannot delete {folder}",
            why=error.strerror or str(error),
            hint="make it writable, and repeat: thinwire runs delete --yes",
        ) from error
