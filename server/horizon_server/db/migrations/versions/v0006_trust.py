"""Workers that outlive the daemon and are restarted, projects with members, scoped tokens, shared resources, an audit log, deletions."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    # In place, without batch mode, as in 0005.
    for table, column in (
        ("jobs", sa.Column("num_restarts", sa.Integer(), nullable=False, server_default="0")),
        ("jobs", sa.Column("not_before_s", sa.Float(), nullable=False, server_default="0")),
        ("jobs", sa.Column("failed_step", sa.BigInteger(), nullable=False, server_default="-1")),
        ("jobs", sa.Column("last_failure", sa.String(length=80), nullable=False, server_default="")),
        ("jobs", sa.Column("journal_line", sa.BigInteger(), nullable=False, server_default="0")),
        ("jobs", sa.Column("deletion_s", sa.Float(), nullable=True)),
        ("jobs", sa.Column("keep_files", sa.Boolean(), nullable=False, server_default="0")),
        ("users", sa.Column("disabled_s", sa.Float(), nullable=True)),
        ("tokens", sa.Column("scope", sa.String(length=16), nullable=False, server_default="full")),
        ("tokens", sa.Column("label", sa.String(length=63), nullable=False, server_default="")),
        ("tokens", sa.Column("created_by", sa.String(length=63), nullable=False, server_default="")),
        ("tokens", sa.Column("last_used_s", sa.Float(), nullable=True)),
        ("allowances", sa.Column("retained_bytes", sa.BigInteger(), nullable=True)),
    ):
        op.add_column(table, column)
    op.create_index("jobs_by_project", "jobs", ["project", "number"])
    op.create_index("jobs_by_deletion", "jobs", ["deletion_s"])
    op.create_index("tokens_by_user", "tokens", ["user"])
    op.create_index("datasets_by_age", "datasets", ["created_s", "dataset_id", "owner"])
    op.create_index("models_by_age", "models", ["created_s", "model_id", "owner"])
    op.create_table(
        "members",
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("user", sa.String(length=63), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("added_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("project", "user"),
    )
    op.create_index("members_by_user", "members", ["user"])
    # A project is what jobs are charged to so far, and nobody saw the jobs of others there. That must not change by an upgrade: only who
    # has a project for themselves decides in it from now on.
    op.execute(
        "INSERT INTO members (project, user, role, added_s) SELECT project, name, 'admin', created_s FROM users AS one "
        "WHERE project = name AND NOT EXISTS (SELECT 1 FROM users AS other WHERE other.project = one.project AND other.name <> one.name) "
        "AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.project = one.project AND jobs.owner <> one.name)"
    )
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
        "audit",
        sa.Column("number", sa.Integer(), nullable=False, autoincrement=True),
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
