"""An aggregator's folder that is worth a backup, and what of a folder a backup holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from tests.support.store_story import LAYOUT, PLAN, accepted, header, opened, status
from thinwire.core.events import ReplicaStored
from thinwire.core.fleet import TaskReport
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Part
from thinwire.server.model_store import Versions
from thinwire.store import FileSpool, Store
from thinwire.store.backup import back_up, restore

BODY = b"frames of an answer"


class Place:
    """An aggregator's folder with a run that goes on, an answer in its spool, and a CA."""

    def __init__(self, folder: Path) -> None:
        self.home = AggregatorHome.under(folder)
        self.store = Store.open(self.home.database)
        self.run_id = self.store.create_run("digits", PLAN, LAYOUT, TaskReport("digits"))
        self.versions = Versions(self.home.run(self.run_id), LAYOUT)
        self.next(0)
        self.store.record(self.run_id, [status("running"), *opened(self.run_id, 1)])
        self.answer("pi-01")
        for name, data in {"ca.pem": b"a certificate", "ca.key": b"its key"}.items():
            (self.home.tls / name).write_bytes(data)

    def next(self, version: int) -> None:
        """Another version, and the one before it goes: what a closing round does."""
        params = np.full(LAYOUT.size, version, np.float32)
        none, remembered = np.zeros(0, np.float32), {"momentum": params}
        stored = self.versions.write(version, params, none, {}, 1.0, remembered)
        replica = self.versions.path(version).with_suffix(".replica")
        replica.write_bytes(b"what devices hold of it")
        held = ReplicaStored(1.0, version, "", replica.name, [], replica.with_suffix(".change").name, [])
        self.store.record(self.run_id, [stored, held])
        self.versions.prune([version], [version])

    def answer(self, device: str) -> None:
        part = Part("frame/0", len(BODY), hashlib.sha256(BODY).hexdigest())
        reply = header(self.run_id, 1, device)
        reply = type(reply)(**{**reply.__dict__, "parts": (part,)})
        spool = FileSpool(self.home.spool)
        draft = spool.draft(reply.update_id)
        draft.write_bytes(BODY)
        spool.commit(draft, reply)
        self.store.record(self.run_id, [accepted(reply, 1)])


def contents(home: AggregatorHome) -> dict[str, bytes]:
    """Everything but the database and what belongs to a running process."""
    files = (path for name in ("runs", "spool", "tls") for path in (home.root / name).rglob("*") if path.is_file())
    return {str(path.relative_to(home.root)): path.read_bytes() for path in files}


def restore_and_settle(home: AggregatorHome, file: Path, store: Store) -> None:
    """Replace an aggregator's folder with a backup of it, and settle the population `toy` as if nothing was lost."""
    back_up(home, file, "1.2.3")
    store.close()
    restore(file, home, force=True)
    with Store.open(home.database, durable=False) as again:
        again.privacy.settle("toy", 0, "", "test")
