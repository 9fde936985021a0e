"""Devices that an admin has withdrawn."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("node_condition", sa.Column("withdrawn", sa.JSON(), nullable=False, server_default="[]"))
