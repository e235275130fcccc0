"""The identity of a run, which is random from here on.

A run that exists keeps the one that it had, which devices hold with their state: it was derived from the run's id and
the time at which it was created.
"""

from __future__ import annotations

import hashlib

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("runs", sa.Column("identity", sa.String(64), nullable=False, server_default=""))
    connection = op.get_bind()
    found = connection.execute(sa.text("SELECT run_id, created_at FROM runs WHERE source = 'devices'")).all()
    for run_id, created_at in found:
        identity = hashlib.sha256(f"{run_id} {float(created_at)!r}".encode()).hexdigest()[:16]
        connection.execute(
            sa.text("UPDATE runs SET identity = :identity WHERE run_id = :run"), {"identity": identity, "run": run_id}
        )
