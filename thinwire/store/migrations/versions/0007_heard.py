"""When a device was last heard of, beside when it came."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("devices", sa.Column("heard_at", sa.Double(), nullable=True))
