"""How a round's devices were drawn, and which answers are of a device that began the run anew."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("rounds", sa.Column("drawn", sa.Text(), nullable=False, server_default=""))
    op.add_column("updates", sa.Column("state_lost", sa.Text(), nullable=False, server_default=""))
