"""Schema migrations, run by Alembic when the daemon opens its database."""
