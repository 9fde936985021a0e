"""Results of evaluation programs in the records of jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("jobs", sa.Column("task_results", sa.Text(), nullable=False, server_default="[]"))
