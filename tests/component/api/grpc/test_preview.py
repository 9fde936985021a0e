"""PreviewDataset on the wire: every field goes through, what is absent takes its default, what is impossible is
named."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from horizon_proto.v1 import dataset_pb2, job_pb2
from horizon_server.datasets.preview import DatasetPreview, PreviewOptions, PreviewRow, PreviewSpan
from horizon_server.records.account import Principal


class Previews:
    """One row, whatever is asked, without a rendering child; remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str, PreviewOptions]] = []

    async def preview(self, principal: Principal, dataset: str, model: str, options: PreviewOptions) -> DatasetPreview:
        options.check()
        self.asked.append((principal.name, dataset, model, options))
        spans = (PreviewSpan(text="hi ", trained=False), PreviewSpan(text="there", trained=True))
        row = PreviewRow(
            file="a.jsonl",
            unit="line",
            number=7,
            spans=spans,
            num_tokens=5,
            num_trained_tokens=2,
            num_cut_tokens=3,
            num_documents=1,
            clipped=True,
            problems=("too long",),
            part="chosen",
        )
        return DatasetPreview(rows=(row,), num_rows=50, format="prompt-completion", options=options)


@pytest.fixture
def previews() -> Previews:
    return Previews()


@pytest.fixture
async def world(base_world: Any, serve: Any, previews: Previews) -> Any:
    async with serve(base_world, previews=previews) as world:
        yield world


async def test_every_field_goes_through(world: Any, previews: Previews) -> None:
    request = dataset_pb2.PreviewDatasetRequest(
        name="chats",
        model="tiny",
        num_rows=2,
        offset=5,
        train_on=job_pb2.TRAIN_ON_LAST_ASSISTANT,
        method=job_pb2.METHOD_PRETRAIN,
        sequence_length=64,
    )
    answer = await world.ann.call("datasets", "PreviewDataset", request)
    options = PreviewOptions(num_rows=2, offset=5, train_on="last-assistant", method="pretrain", sequence_length=64)
    assert previews.asked == [("ann", "chats", "tiny", options)]
    spans = [dataset_pb2.PreviewSpan(text="hi "), dataset_pb2.PreviewSpan(text="there", trained=True)]
    row = dataset_pb2.PreviewRow(
        spans=spans,
        num_tokens=5,
        num_trained_tokens=2,
        file="a.jsonl",
        unit="line",
        number=7,
        num_cut_tokens=3,
        num_documents=1,
        clipped=True,
        problems=["too long"],
        part="chosen",
    )
    assert answer == dataset_pb2.PreviewDatasetResponse(
        rows=[row],
        num_rows=50,
        format=dataset_pb2.DATASET_FORMAT_PROMPT_COMPLETION,
        sequence_length=64,
        train_on=job_pb2.TRAIN_ON_LAST_ASSISTANT,
        method=job_pb2.METHOD_PRETRAIN,
    )
    unset = {field.name for field in answer.rows[0].DESCRIPTOR.fields} - {
        f.name for f, _ in answer.rows[0].ListFields()
    }
    assert unset == set(), "a field that is added to the contract and forgotten here would be dropped in silence"


async def test_what_is_absent_takes_its_default(world: Any, previews: Previews) -> None:
    answer = await world.ann.call("datasets", "PreviewDataset", dataset_pb2.PreviewDatasetRequest(name="chats"))
    assert previews.asked[0][3] == PreviewOptions()
    assert (answer.train_on, answer.method) == (job_pb2.TRAIN_ON_ASSISTANT, job_pb2.METHOD_SFT)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_rows", -1), ("num_rows", 101), ("offset", -1), ("sequence_length", 7), ("method", 77), ("train_on", 77)],
)
async def test_what_is_out_of_range_is_named(world: Any, field: str, value: int) -> None:
    request = dataset_pb2.PreviewDatasetRequest(name="chats", model="tiny", **{field: value})  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError, match=f"{field} is .*{value}.*; it must be") as caught:
        await world.ann.call("datasets", "PreviewDataset", request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
