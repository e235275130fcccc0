"""When a device failed an ask, and how long a round was open while its run's clock stood still."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("updates", sa.Column("failed_at", sa.Double(), nullable=True))
    op.add_column("rounds", sa.Column("missed_s", sa.Double(), nullable=False, server_default="0"))
