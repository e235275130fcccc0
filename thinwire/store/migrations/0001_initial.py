"""The first revision. It has no steps: no database is older, and a new one gets today's tables (store/schema.py)."""

from __future__ import annotations

revision = "0001_initial"
down_revision = None


def upgrade() -> None:
    """Change nothing."""
