"""Which clients' metrics were clipped, in what `best` and `target` go by, and how many metrics were not recorded."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("runs", sa.Column("clipped", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("rounds", sa.Column("clipped", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("rounds", sa.Column("ignored", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("updates", sa.Column("clipped", sa.JSON(), nullable=False, server_default="[]"))
