"""Jobs that were sent to other machines of the fleet."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("jobs", sa.Column("box", sa.String(length=63), nullable=False, server_default=""))
