"""This module selects the files of runs that a backup holds, and decides what differs for secure runs.

A backup has no masked update and no message of an open secure round (ADR 10). A restored aggregator therefore ends such
a round as aborted, and begins the next one with the number that it has in the restored journal. The lost aggregator may
have used that number already. A client has one masked vector and one unmask answer for each round of a run's identity,
so `renew` gives each secure run that is not over a new identity: its devices take it for another run of the same name.
A private run gets one too, so that its devices book a round that is made again as another release.

A backup has the privacy ledger. What was reserved after it is lost, and nobody knows how much that is: a restore marks
open reservations as lost, and blocks private rounds until a person has settled (store/privacy_ledger.py).

Invariant: no round of a run's identity is made twice, also if one backup is restored several times.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from thinwire.core.types import UpdateId
from thinwire.store.store import IDENTITY_BYTES

# No outside text; a plan of an older version has no [secure].
IS_SECURE = "coalesce(json_extract(runs.plan, '$.secure.enabled'), 0)"
IS_PRIVATE = "coalesce(json_extract(runs.plan, '$.privacy.mode'), 'off') <> 'off'"
OVER = "('done', 'failed', 'stopped')"


def missing_files(stage: Path, database: Path) -> Iterator[str]:
    """Yield the missing files that runs need to resume.

    A run that has not ended needs its last model with the server optimizer's state, and the devices' replica of it. It
    also needs the replies of an open round.
    """
    going = "runs.status NOT IN ('preparing', 'done', 'failed', 'stopped')"
    models = f"SELECT run_id, model_file FROM runs WHERE model_file <> '' AND {going}"  # noqa: S608  # no outside text
    state = (
        "SELECT json_extract(body, '$.state') FROM journal"
        " WHERE run_id = ? AND kind = 'ModelStored' AND json_extract(body, '$.file') = ? ORDER BY seq DESC"
    )
    replica = (
        "SELECT json_extract(body, '$.file') FROM journal JOIN runs USING (run_id)"
        " WHERE run_id = ? AND journal.kind = 'ReplicaStored' AND json_extract(body, '$.version') = runs.version"
    )
    answers = (
        "SELECT updates.update_id FROM updates JOIN runs USING (run_id) LEFT JOIN rounds"  # noqa: S608
        " ON rounds.run_id = updates.run_id"
        " AND rounds.round = coalesce(updates.aggregated_round, updates.round + updates.staleness)"
        " WHERE updates.outcome IN ('accepted', 'aggregated', 'aggregated-late')"
        f" AND rounds.closed_at IS NULL AND {going} AND NOT ({IS_SECURE} OR {IS_PRIVATE})"
    )
    with contextlib.closing(sqlite3.connect(database)) as copy:
        needed = list[str]()
        for run, file in copy.execute(models).fetchall():
            needed.append(f"runs/{run}/{file}")
            if (copy.execute(state, (run, file)).fetchone() or ("",))[0]:
                needed.append(str(Path(needed[-1]).with_suffix(".state")))
            needed += [f"runs/{run}/{name}" for (name,) in copy.execute(replica, (run,))]
        for (text,) in copy.execute(answers):
            update = UpdateId.parse(text)
            needed.append(f"spool/{update.run}/{update.device}-{update.sequence}.reply")
    return (name for name in needed if not (stage / name).exists())


def protected_runs(database: Path) -> list[str]:
    """Return the ids of all secure and private runs in the copy of a store."""
    with contextlib.closing(sqlite3.connect(database)) as copy:
        return [run_id for (run_id,) in copy.execute(f"SELECT run_id FROM runs WHERE {IS_SECURE} OR {IS_PRIVATE}")]  # noqa: S608


def leave_out(stage: Path, database: Path) -> None:
    """Remove from a staging folder all updates and messages of secure and private rounds, and models with noise that
    no commit names.
    """
    for run_id in protected_runs(database):
        shutil.rmtree(stage / "spool" / run_id, ignore_errors=True)
        shutil.rmtree(stage / "runs" / run_id / "secure", ignore_errors=True)
        for hidden in (stage / "runs" / run_id).glob("*.hidden"):
            hidden.unlink()


def renew(database: Path) -> None:
    """Give each secure or private run that is not over a new identity, in a restored store that nobody uses yet."""
    with contextlib.closing(sqlite3.connect(database)) as restored:
        columns = {row[1] for row in restored.execute("PRAGMA table_info(runs)")}
        if "identity" not in columns:  # a store of an older version, which had no secure runs
            return
        found = restored.execute(
            f"SELECT run_id FROM runs WHERE ({IS_SECURE} OR {IS_PRIVATE}) AND identity <> '' AND status NOT IN {OVER}"  # noqa: S608
        ).fetchall()
        for (run_id,) in found:
            new = secrets.token_hex(IDENTITY_BYTES), run_id
            restored.execute("UPDATE runs SET identity = ? WHERE run_id = ?", new)
        restored.commit()


def end_sessions(database: Path, now: float) -> None:
    """Delete the sessions and login codes of a restored store, and withdraw its open invitations.

    What ended a session, or used or withdrew an invitation, since the backup is not in it.
    """
    with contextlib.closing(sqlite3.connect(database)) as restored:
        tables = {name for (name,) in restored.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for table in {"sessions", "logins"} & tables:
            restored.execute(f"DELETE FROM {table}")  # noqa: S608  # no outside text
        if "invitations" in tables:
            is_open = "used_at IS NULL AND withdrawn_at IS NULL"
            restored.execute(f"UPDATE invitations SET withdrawn_at = ? WHERE {is_open}", (now,))  # noqa: S608  # as above
        restored.commit()


def lose_reservations(database: Path, backed_up_at: float) -> tuple[int, int]:
    """Write into a restored privacy ledger that what was reserved since its backup is unknown.

    Return the number of its entries, and that of private runs on devices: rounds of these wait also without an entry.
    An open reservation stays spent and is never committed: the lost aggregator may have released its round.
    """
    with contextlib.closing(sqlite3.connect(database)) as restored:
        columns = [row[1] for row in restored.execute("PRAGMA table_info(privacy_ledger)")]
        if not columns:  # a store of an older version, which had no private runs
            return 0, 0
        restored.execute("UPDATE privacy_ledger SET state = 'lost' WHERE state = 'reserved'")
        row = dict.fromkeys(columns, "") | {"id": None, "state": "unknown", "at": backed_up_at, "round": 0, "count": 0}
        places = ", ".join(f":{name}" for name in row)
        restored.execute(f"INSERT INTO privacy_ledger ({', '.join(row)}) VALUES ({places})", row)  # noqa: S608
        restored.commit()
        of_devices = f"runs WHERE {IS_PRIVATE} AND source = 'devices'"
        counted = (f"SELECT count(*) FROM {found}" for found in ("privacy_ledger WHERE count > 0", of_devices))  # noqa: S608
        entries, private_runs = (int(restored.execute(one).fetchone()[0]) for one in counted)
        return entries, private_runs
