"""What is measured of devices, why rounds have their deadlines and codecs, and how large residuals are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "measures",
        sa.Column("device", sa.String(length=63), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("work", sa.String(length=64), nullable=False),
        sa.Column("samples", sa.JSON(), nullable=False),
        sa.Column("p50", sa.Double(), nullable=True),
        sa.Column("p90", sa.Double(), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("device", "kind", "work", name="pk_measures"),
    )
    op.add_column("rounds", sa.Column("deadline_reason", sa.Text(), nullable=False, server_default=""))
    op.add_column("rounds", sa.Column("codecs", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("rounds", sa.Column("codec_reasons", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("updates", sa.Column("residual_ratio", sa.Double(), nullable=True))
