"""Webhooks, and their deliveries."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "webhooks",
        sa.Column("webhook_id", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=63), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("events", sa.JSON(), nullable=False),
        sa.Column("format", sa.String(length=16), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("disabled_s", sa.Float(), nullable=True),
        sa.Column("disable_reason", sa.Text(), nullable=False),
        sa.Column("last_attempt_s", sa.Float(), nullable=True),
        sa.Column("last_result", sa.Text(), nullable=False),
        sa.Column("num_given_up", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("webhook_id"),
    )
    op.create_index("webhooks_by_owner", "webhooks", ["owner"])
    op.create_index("webhooks_by_project", "webhooks", ["project"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("delivery_id", sa.String(length=32), nullable=False),
        sa.Column("webhook_id", sa.String(length=32), nullable=False),
        sa.Column("event", sa.String(length=32), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("last_attempt_s", sa.Float(), nullable=True),
        sa.Column("next_attempt_s", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("delivery_id"),
    )
    op.create_index("webhook_deliveries_by_time", "webhook_deliveries", ["outcome", "next_attempt_s"])
    op.create_index("webhook_deliveries_by_webhook", "webhook_deliveries", ["webhook_id", "number"])
