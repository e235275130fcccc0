"""Why devices were asked in the middle of a round and for so much work, and what a run has to say to who follows it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("runs", sa.Column("notes", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("updates", sa.Column("asked_why", sa.Text(), nullable=False, server_default=""))
    op.add_column("updates", sa.Column("instead_of", sa.String(length=63), nullable=False, server_default=""))
    op.add_column("updates", sa.Column("work_reason", sa.Text(), nullable=False, server_default=""))
