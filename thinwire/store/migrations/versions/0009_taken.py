"""When a device took an ask up for the first time: one that is killed and comes back takes it up again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("updates", sa.Column("taken_at", sa.Double(), nullable=True))
