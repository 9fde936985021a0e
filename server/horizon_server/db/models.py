"""Models in the database."""

from __future__ import annotations

from sqlalchemy.orm import InstrumentedAttribute

from horizon_server.db.named_rows import NamedRows, blob_files, file_documents
from horizon_server.db.tables import ModelRow
from horizon_server.records.model import ModelRecord


class ModelStore(NamedRows[ModelRow, ModelRecord]):
    """The table of models."""

    what = "model"
    row_type = ModelRow

    def id_column(self) -> InstrumentedAttribute[str]:
        """Return the column of the table's ids."""
        return ModelRow.model_id

    async def mark_ready(self, model_id: str, *, architecture: str, num_parameters: int) -> ModelRecord:
        """Make it READY; raises NotFound when it was deleted meanwhile."""
        return await self.make_ready(model_id, architecture=architecture, num_parameters=num_parameters)

    def to_record(self, row: ModelRow) -> ModelRecord:
        """Return what the domain knows of a row."""
        return ModelRecord(
            model_id=row.model_id,
            owner=row.owner,
            name=row.name,
            files=blob_files(row.files),
            ready=row.ready,
            architecture=row.architecture,
            num_parameters=row.num_parameters,
            digest=row.digest,
            created_s=row.created_s,
        )

    def to_row(self, record: ModelRecord) -> ModelRow:
        """Return the row of a new record."""
        return ModelRow(
            model_id=record.model_id,
            owner=record.owner,
            name=record.name,
            files=file_documents(record.files),
            ready=record.ready,
            architecture=record.architecture,
            num_parameters=record.num_parameters,
            digest=record.digest,
            created_s=record.created_s,
        )

    def request_body(self, record: ModelRecord) -> object:
        """Return what makes two create calls the same call, as plain data."""
        return [record.name, file_documents(sorted(record.files, key=lambda file: file.path))]
