"""A queue that resumed jobs join at its end, quick searches by name, and the state folder that a database belongs to."""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    # In place, without batch mode: that drops the table and makes it again, which the events' foreign key forbids.
    op.add_column("jobs", sa.Column("queue_order", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute("UPDATE jobs SET queue_order = number")
    op.execute("ALTER TABLE jobs DROP COLUMN queued_s")
    op.drop_index("jobs_by_state", "jobs")
    op.create_index("jobs_in_queue", "jobs", ["job_state", "queue_order"])
    op.create_index("jobs_by_queue_order", "jobs", ["queue_order"])
    op.create_index("jobs_by_name", "jobs", ["name", "number"])
    state_folder = op.create_table(
        "state_folder",
        sa.Column("state_id", sa.String(length=32), nullable=False),
        sa.Column("num_checks", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("state_id"),
    )
    op.bulk_insert(state_folder, [{"state_id": secrets.token_hex(8), "num_checks": 0}])
