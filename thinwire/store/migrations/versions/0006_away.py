"""When no aggregator was there while a round was open."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("rounds", sa.Column("away", sa.JSON(), nullable=False, server_default="[]"))
