"""A table of the contents that datasets and models are made of, so that no query searches their lists of files."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "blob_references",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("resource_id", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("sha256", "resource_id"),
    )
    op.create_index("ix_blob_references_resource_id", "blob_references", ["resource_id"])
    for table, resource_id in (("datasets", "dataset_id"), ("models", "model_id")):
        op.execute(
            f"INSERT OR IGNORE INTO blob_references (sha256, resource_id) "  # names of our own
            f"SELECT json_extract(each.value, '$.sha256'), {resource_id} FROM {table}, json_each({table}.files) AS each"
        )
