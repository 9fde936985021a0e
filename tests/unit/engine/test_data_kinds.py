"""Prepared data of the kinds that are not text: what the worker reads is what was written."""

from __future__ import annotations

import array
import json
from pathlib import Path

import pytest
import torch

from horizon_formats.formats import DataKind, DatasetFormat, kind_of
from horizon_server.datasets.recipe import PrepareOptions, prepared_folder
from horizon_server.engine.data import PreparedDataset, StepPlan
from horizon_server.engine.objectives import unpaired
from horizon_server.errors import InvalidData
from horizon_server.store import prepared
from horizon_server.store.prepared import DocumentColumns, PreparedFolder, planes_of

# Token ids, the mask of what is trained, and how many targets that is.
DOCUMENTS = [
    ([5, 6, 7], b"\0\1\1", 2),
    ([5, 8], b"\0\1", 1),
    ([9, 9, 9, 4], b"\0\0\1\1", 2),
    ([9, 9, 2, 3], b"\0\0\1\0", 1),
]


def written(folder: Path, kind: DataKind, num_documents: int = len(DOCUMENTS)) -> PreparedDataset:
    columns = DocumentColumns()
    for number, (ids, trained, num_targets) in enumerate(DOCUMENTS[:num_documents]):
        numbers = array.array("f", [number + place / 8 for place in range(num_targets)])
        columns.add(
            array.array("i", ids),
            trained,
            num_targets,
            label=(1, -1, 0, -1)[number] if kind is DataKind.KTO else None,
            old_logprobs=array.array("f", [-value for value in numbers]) if kind is DataKind.SAMPLES else None,
            advantages=numbers if kind is DataKind.SAMPLES else None,
        )
    with PreparedFolder(folder, with_evaluation=False, kind=kind) as target:
        target.train.add(columns)
        target.publish({"kind": kind})
    return PreparedDataset.open(folder)


@pytest.mark.parametrize("kind", DataKind)
def test_every_kind_has_its_tokens_and_its_size_of_groups(tmp_path: Path, kind: DataKind) -> None:
    dataset = written(tmp_path / "out", kind)
    assert dataset.kind is kind
    assert dataset.group_size == (2 if kind in ("preference", "kto") else 1)
    assert [dataset.micro_batch([number]).input_ids_T.tolist() for number in range(4)] == [
        ids for ids, _, _ in DOCUMENTS
    ]
    assert dataset.num_targets_of_documents.tolist() == [2, 1, 2, 1]


def test_labels_are_those_of_the_documents_asked_for(tmp_path: Path) -> None:
    dataset = written(tmp_path / "out", DataKind.KTO)
    labels = dataset.labels_of([3, 0, 2])
    assert (labels.dtype, labels.tolist()) == (torch.int8, [-1, 1, 0])
    assert dataset.labels_of([]).shape == (0,)
    with pytest.raises(
        InvalidData, match="was prepared as kto, which has no advantages; use a dataset of kind samples"
    ):
        dataset.advantages_of([0])


def test_the_labels_are_the_codes_of_the_objective() -> None:
    codes = (prepared.DESIRABLE, prepared.UNDESIRABLE, prepared.MISMATCHED)
    assert codes == (unpaired.DESIRABLE, unpaired.UNDESIRABLE, unpaired.MISMATCHED)


def test_numbers_of_samples_follow_the_supervised_tokens(tmp_path: Path) -> None:
    dataset = written(tmp_path / "out", DataKind.SAMPLES)
    advantages = dataset.advantages_of(iter([2, 0]))
    assert (advantages.dtype, advantages.tolist()) == (torch.float32, [2.0, 2.125, 0.0, 0.125])
    assert dataset.old_logprobs_of([3, 1]).tolist() == [-3.0, -1.0]
    assert dataset.old_logprobs_of([]).shape == (0,)
    with pytest.raises(InvalidData, match="was prepared as samples, which has no labels; use a dataset of kind kto"):
        dataset.labels_of([0])


def test_a_pair_is_in_one_step(tmp_path: Path) -> None:
    dataset = written(tmp_path / "out", DataKind.PREFERENCE)
    plan = StepPlan(dataset, sequence_length=8, tokens_per_step=8, epochs=1, group_size=dataset.group_size)
    steps = [sorted(document for row in plan.documents_of(i) for document in row) for i in range(plan.num_steps)]
    assert sorted(steps) == [[0, 1], [2, 3]]


def test_half_a_pair_an_unknown_kind_and_missing_planes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="3 documents, which do not match its kind, preference"):
        written(tmp_path / "odd", DataKind.PREFERENCE, 3)
    written(tmp_path / "text", DataKind.TEXT)
    report = tmp_path / "text" / "report.json"
    report.write_text(json.dumps({"kind": "kto"}))
    with pytest.raises(InvalidData, match="labels"):
        PreparedDataset.open(tmp_path / "text")
    report.write_text(json.dumps({"kind": "images"}))
    with pytest.raises(InvalidData, match="kind 'images'; this version knows text, preference, kto, samples"):
        PreparedDataset.open(tmp_path / "text")
    report.write_text("{}")
    with pytest.raises(InvalidData, match="is not a prepared dataset"):
        PreparedDataset.open(tmp_path / "text")


def test_the_folder_of_text_has_the_planes_that_it_always_had() -> None:
    assert list(planes_of(DataKind.TEXT).items()) == [
        ("document_starts", "I64"),
        ("input_ids", "I32"),
        ("trained", "U8"),
    ]
    assert list(planes_of(DataKind.SAMPLES)) == [
        "document_starts",
        "input_ids",
        "old_logprobs",
        "advantages",
        "trained",
    ]


def test_the_key_of_prepared_text_stays_and_methods_share_a_preference() -> None:
    before = PrepareOptions(format=DatasetFormat.MESSAGES, field_map={"messages": "chat"}, eval_fraction=0.25)
    # What users have prepared is found again, until the tokens or the report of prepared data change
    # (`PREPARATION_VERSION`).
    known = "7b37630c1a290407478fc4bc4f9f0fb8b23290c88fe6513517d83e06dddd2a7f"
    assert prepared_folder(Path(), "digest", "tokenizer", before).name == known
    keys = {
        prepared_folder(
            Path(), "d", "t", PrepareOptions(format=DatasetFormat.PREFERENCE, method=method, train_on=train_on)
        )
        for method, train_on in (("sft", "assistant"), ("dpo", "all"))
    }
    assert len(keys) == 1
    assert [kind_of(name) for name in DatasetFormat if name is not DatasetFormat.AUTO] == [
        *["text"] * 6,
        *["preference"] * 2,
        "kto",
        "samples",
    ]
