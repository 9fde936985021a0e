"""Migrations of a later version, for tests of upgrades: this version's, and after them some that each make and fill a
table."""

from __future__ import annotations

import shutil
from pathlib import Path

from horizon_server.db.database import MIGRATIONS
from horizon_server.db.database_file import known_schemas

NEWEST = known_schemas()[-1]
"""The schema of this version."""

_MIGRATION = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "{revision}", "{previous}"


def upgrade() -> None:
    op.add_column("users", sa.Column("of_{revision}", sa.Text(), nullable=False, server_default=""))
    op.create_table("of_{revision}", sa.Column("name", sa.Text(), primary_key=True))
    op.execute("INSERT INTO of_{revision} SELECT name FROM users")
"""
LATER_HORIZOND = """
import sys
from pathlib import Path
from horizon_server.db import database
database.MIGRATIONS = Path(sys.argv.pop(1))
from horizon_server.__main__ import main
sys.exit(main())
"""


def later_schemas(count: int = 1) -> list[str]:
    """The schemas that `later_migrations` adds."""
    return [f"{int(NEWEST) + number:04d}" for number in range(1, count + 1)]


def later_migrations(folder: Path, count: int = 1) -> Path:
    """Write the migrations of a version that is `count` schemas ahead into a new folder, for `database.MIGRATIONS`;
    return it."""
    target = folder / f"migrations-{count}"
    shutil.copytree(MIGRATIONS, target, ignore=shutil.ignore_patterns("__pycache__"))
    previous = NEWEST
    for revision in later_schemas(count):
        text = _MIGRATION.format(revision=revision, previous=previous)
        (target / "versions" / f"v{revision}_later.py").write_text(text, "ascii")
        previous = revision
    return target
