"""Alembic's entry: it works on the connection, and in the transaction, that store/schema.py hands it."""

from __future__ import annotations

from alembic import context

from thinwire.store import run_tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=run_tables.Run.metadata,
    transactional_ddl=True,  # SQLite can, once the driver does not commit behind our back
)
context.run_migrations()
