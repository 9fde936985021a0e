"""Datasets in the database."""

from __future__ import annotations

from sqlalchemy.orm import InstrumentedAttribute

from horizon_server.db.named_rows import NamedRows, blob_files, file_documents
from horizon_server.db.tables import DatasetRow
from horizon_server.records.dataset import DatasetRecord


class DatasetStore(NamedRows[DatasetRow, DatasetRecord]):
    """The table of datasets."""

    what = "dataset"
    row_type = DatasetRow

    def id_column(self) -> InstrumentedAttribute[str]:
        """Return the column of the table's ids."""
        return DatasetRow.dataset_id

    async def mark_ready(self, dataset_id: str, *, format: str, num_rows: int, digest: str) -> DatasetRecord:  # noqa: A002
        """Make it READY; raises NotFound when it was deleted meanwhile."""
        return await self.make_ready(dataset_id, format=format, num_rows=num_rows, digest=digest)

    def to_record(self, row: DatasetRow) -> DatasetRecord:
        """Return what the domain knows of a row."""
        return DatasetRecord(
            dataset_id=row.dataset_id,
            owner=row.owner,
            name=row.name,
            format=row.format,
            field_map=dict(row.field_map),
            files=blob_files(row.files),
            ready=row.ready,
            num_rows=row.num_rows,
            digest=row.digest,
            created_s=row.created_s,
        )

    def to_row(self, record: DatasetRecord) -> DatasetRow:
        """Return the row of a new record."""
        return DatasetRow(
            dataset_id=record.dataset_id,
            owner=record.owner,
            name=record.name,
            format=record.format,
            field_map=record.field_map,
            files=file_documents(record.files),
            ready=record.ready,
            num_rows=record.num_rows,
            digest=record.digest,
            created_s=record.created_s,
        )

    def request_body(self, record: DatasetRecord) -> object:
        """Return what makes two create calls the same call, as plain data."""
        return [record.name, record.format, record.field_map, file_documents(record.files)]
