"""Previews on the wire. What is absent there takes the default; nothing is judged here."""

from __future__ import annotations

from typing import Any

from horizon_proto.v1 import dataset_pb2, job_pb2
from horizon_server.api.grpc.wire_spec import from_enums, to_enums
from horizon_server.datasets.preview.request import DatasetPreview, PreviewOptions

_NUMBERS = ("num_rows", "offset", "sequence_length")
_ENUMS = {"method": job_pb2.Method, "train_on": job_pb2.TrainOn}


def preview_options(request: dataset_pb2.PreviewDatasetRequest) -> PreviewOptions:
    """Return which rows a request asks for, and how they are to be rendered."""
    given: dict[str, Any] = {name: getattr(request, name) for name in _NUMBERS if getattr(request, name)}
    given |= from_enums(request, _ENUMS)
    return PreviewOptions(**given)


def from_preview(
    preview: DatasetPreview,
    format: dataset_pb2.DatasetFormat.ValueType,  # noqa: A002  # the contract's word
) -> dataset_pb2.PreviewDatasetResponse:
    """Return a preview for an answer."""
    response = dataset_pb2.PreviewDatasetResponse(
        num_rows=preview.num_rows, format=format, sequence_length=preview.options.sequence_length
    )
    to_enums(preview.options, response, _ENUMS)
    for row in preview.rows:
        shown = response.rows.add(
            num_tokens=row.num_tokens,
            num_trained_tokens=row.num_trained_tokens,
            file=row.file,
            unit=row.unit,
            number=row.number,
            num_cut_tokens=row.num_cut_tokens,
            num_documents=row.num_documents,
            clipped=row.clipped,
            problems=row.problems,
        )
        for span in row.spans:
            shown.spans.add(text=span.text, trained=span.trained)
    return response
