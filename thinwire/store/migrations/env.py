"""Alembic's entry point: it uses the connection and the transaction of store/schema.py."""

from __future__ import annotations

from alembic import context

from thinwire.store import tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=tables.Run.metadata,
    transactional_ddl=True,  # SQLite supports it, since the driver does not commit by itself here
)
context.run_migrations()
