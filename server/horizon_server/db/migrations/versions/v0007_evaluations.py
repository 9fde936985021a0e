"""Named eval sets of a job, and its first, best and last evaluation."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    # In place, without batch mode, as in 0005.
    op.add_column("jobs", sa.Column("eval_set_ids", sa.Text(), nullable=False, server_default="{}"))
    op.add_column("jobs", sa.Column("evaluations", sa.Text(), nullable=False, server_default=""))
