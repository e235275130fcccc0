"""Invitations, who did what to which device, and what the door refused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

COUNTER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "invitations",
        sa.Column("id", COUNTER, nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("approve_manually", sa.Boolean(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("used_by", sa.String(length=63), nullable=False),
        sa.Column("used_key", sa.String(length=64), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=True),
        sa.Column("withdrawn_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_invitations"),
        sa.UniqueConstraint("secret_hash", name="uq_invitations_secret_hash"),
    )
    op.create_table(
        "device_actions",
        sa.Column("id", COUNTER, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("what", sa.String(length=16), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_device_actions"),
    )
    op.create_index("ix_device_actions_device", "device_actions", ["device"], unique=False)
    op.create_table(
        "door_notes",
        sa.Column("id", COUNTER, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_door_notes"),
    )
