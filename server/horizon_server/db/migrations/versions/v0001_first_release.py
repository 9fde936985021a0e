"""The schema of the first release."""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
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
        sa.Column("retained_bytes", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("holder", "name"),
    )
    op.create_table(
        "audit",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("time_s", sa.Float(), nullable=False),
        sa.Column("user", sa.String(length=63), nullable=False),
        sa.Column("token_id", sa.String(length=16), nullable=False),
        sa.Column("origin", sa.String(length=128), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("resource", sa.String(length=256), nullable=False),
        sa.Column("outcome", sa.String(length=64), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_index("audit_by_time", "audit", ["time_s"])
    op.create_index("audit_by_user", "audit", ["user", "time_s"])
    op.create_table(
        "blob_references",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("resource_id", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("sha256", "resource_id"),
    )
    op.create_index("ix_blob_references_resource_id", "blob_references", ["resource_id"])
    op.create_table(
        "datasets",
        sa.Column("dataset_id", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("format", sa.String(length=32), nullable=False),
        sa.Column("field_map", sa.JSON(), nullable=False),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("ready", sa.Boolean(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("dataset_id"),
        sa.UniqueConstraint("owner", "name"),
    )
    op.create_index("datasets_by_age", "datasets", ["created_s", "dataset_id", "owner"])
    op.create_table(
        "grants",
        sa.Column("resource_id", sa.String(length=32), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("granted_by", sa.String(length=63), nullable=False),
        sa.Column("granted_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("resource_id", "project"),
    )
    op.create_index("grants_by_project", "grants", ["project"])
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=63), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("dataset_id", sa.String(length=32), nullable=False),
        sa.Column("eval_dataset_id", sa.String(length=32), nullable=False),
        sa.Column("job_state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("wanted", sa.String(length=16), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("num_steps", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("queue_order", sa.BigInteger(), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("queued_s", sa.Float(), nullable=False),
        sa.Column("started_s", sa.Float(), nullable=False),
        sa.Column("ended_s", sa.Float(), nullable=False),
        sa.Column("device_s", sa.Float(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.Text(), nullable=False),
        sa.Column("plan", sa.JSON(), nullable=True),
        sa.Column("data_report", sa.JSON(), nullable=True),
        sa.Column("last_sequence", sa.BigInteger(), nullable=False),
        sa.Column("num_restarts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("failed_step", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("last_failure", sa.String(length=80), server_default="", nullable=False),
        sa.Column("not_before_s", sa.Float(), server_default="0", nullable=False),
        sa.Column("journal_line", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("deletion_s", sa.Float(), nullable=True),
        sa.Column("keep_files", sa.Boolean(), server_default="0", nullable=False),
        sa.Column("eval_set_ids", sa.Text(), server_default="{}", nullable=False),
        sa.Column("evaluations", sa.Text(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("job_id"),
    )
    op.create_index("jobs_by_deletion", "jobs", ["deletion_s"])
    op.create_index("jobs_by_end", "jobs", ["ended_s"])
    op.create_index("jobs_by_name", "jobs", ["name", "number"])
    op.create_index("jobs_by_owner", "jobs", ["owner", "number"])
    op.create_index("jobs_by_project", "jobs", ["project", "number"])
    op.create_index("jobs_by_queue_order", "jobs", ["queue_order"])
    op.create_index("jobs_by_rank", "jobs", ["job_state", "project", "owner", "priority", "queue_order"])
    op.create_index("jobs_in_queue", "jobs", ["job_state", "queue_order"])
    op.create_table(
        "members",
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("user", sa.String(length=63), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("added_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("project", "user"),
    )
    op.create_index("members_by_user", "members", ["user"])
    op.create_table(
        "models",
        sa.Column("model_id", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("ready", sa.Boolean(), nullable=False),
        sa.Column("architecture", sa.String(length=64), nullable=False),
        sa.Column("num_parameters", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("model_id"),
        sa.UniqueConstraint("owner", "name"),
    )
    op.create_index("models_by_age", "models", ["created_s", "model_id", "owner"])
    op.create_table(
        "node_condition",
        sa.Column("row_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("mode", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("window_start_s", sa.Float(), nullable=True),
        sa.Column("window_end_s", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("row_id"),
    )
    op.create_table(
        "requests",
        sa.Column("user", sa.String(length=63), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("method", sa.String(length=32), nullable=False),
        sa.Column("body_sha256", sa.String(length=64), nullable=False),
        sa.Column("resource_id", sa.String(length=64), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("user", "request_id"),
    )
    op.create_table(
        "share_uses",
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("user", sa.String(length=63), nullable=False),
        sa.Column("device_s", sa.Float(), nullable=False),
        sa.Column("as_of_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("project", "user"),
    )
    state_folder = op.create_table(
        "state_folder",
        sa.Column("state_id", sa.String(length=32), nullable=False),
        sa.Column("num_checks", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("state_id"),
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
        "users",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("disabled_s", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("time_s", sa.Float(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"]),
        sa.PrimaryKeyConstraint("job_id", "sequence"),
    )
    op.create_table(
        "tokens",
        sa.Column("token_id", sa.String(length=16), nullable=False),
        sa.Column("user", sa.String(length=63), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("expires_s", sa.Float(), nullable=True),
        sa.Column("revoked_s", sa.Float(), nullable=True),
        sa.Column("scope", sa.String(length=16), server_default="full", nullable=False),
        sa.Column("label", sa.String(length=63), server_default="", nullable=False),
        sa.Column("created_by", sa.String(length=63), server_default="", nullable=False),
        sa.Column("last_used_s", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["user"], ["users.name"]),
        sa.PrimaryKeyConstraint("token_id"),
        sa.UniqueConstraint("sha256"),
    )
    op.create_index("tokens_by_user", "tokens", ["user"])
    # The id of the state folder that this database belongs to.
    op.bulk_insert(state_folder, [{"state_id": secrets.token_hex(8), "num_checks": 0}])
