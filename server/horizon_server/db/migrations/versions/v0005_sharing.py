"""Several jobs share the node: who has used how much of it, weights and quotas, and the condition of the node."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    # In place, without batch mode: that drops the table and makes it again, which the events' foreign key forbids.
    for column in (
        sa.Column("project", sa.String(length=63), nullable=False, server_default=""),
        sa.Column("priority", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("queued_s", sa.Float(), nullable=False, server_default="0"),
        sa.Column("device_s", sa.Float(), nullable=False, server_default="0"),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False, server_default="0"),
    ):
        op.add_column("jobs", column)
    op.execute(
        "UPDATE jobs SET project = coalesce(nullif(json_extract(spec, '$.project'), ''), owner), "
        "priority = coalesce(json_extract(spec, '$.priority'), 0), queued_s = created_s"
    )
    # The last thing that happened to a job that waits is that it was queued.
    op.execute(
        "UPDATE jobs SET queued_s = coalesce((SELECT time_s FROM events "
        "WHERE events.job_id = jobs.job_id AND sequence = last_sequence), created_s) WHERE job_state = 'QUEUED'"
    )
    op.create_index("jobs_by_end", "jobs", ["ended_s"])
    op.create_index("jobs_by_rank", "jobs", ["job_state", "project", "owner", "priority", "queue_order"])
    op.create_table(
        "share_uses",
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("user", sa.String(length=63), nullable=False),
        sa.Column("device_s", sa.Float(), nullable=False),
        sa.Column("as_of_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("project", "user"),
    )
    op.create_table(
        "usage_hours",
        sa.Column("hour_s", sa.BigInteger(), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("user", sa.String(length=63), nullable=False),
        sa.Column("device_s", sa.Float(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("hour_s", "project", "user"),
    )
    op.create_table(
        "allowances",
        sa.Column("holder", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("max_queued_jobs", sa.Integer(), nullable=True),
        sa.Column("max_resident_jobs", sa.Integer(), nullable=True),
        sa.Column("max_host_bytes", sa.BigInteger(), nullable=True),
        sa.Column("max_stored_bytes", sa.BigInteger(), nullable=True),
        sa.Column("device_hours_per_week", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("holder", "name"),
    )
    op.create_table(
        "node_condition",
        sa.Column("row_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("mode", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("window_start_s", sa.Float(), nullable=True),
        sa.Column("window_end_s", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("row_id"),
    )
