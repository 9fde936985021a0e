"""Alembic's entry: runs migrations over the connection that `db.database.migrate` hands in."""

from alembic import context

from horizon_server.db.tables import Table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    render_as_batch=True,
    transaction_per_migration=False,
)
context.run_migrations()
