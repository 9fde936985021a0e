"""Alembic's entry: runs migrations over the connection that `db.database.migrate` hands in."""

from alembic import context

from horizon_server.db.tables import Table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    render_as_batch=True,  # autogenerate then writes what SQLite can do: it cannot alter most of a table in place
    transaction_per_migration=False,  # `migrate` has begun one over all of them
)
context.run_migrations()
