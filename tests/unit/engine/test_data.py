"""Step plans: every document once per epoch, labels inside documents, steps a pure function of their number."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from horizon_server.engine.data import PreparedDataset, StepPlan
from horizon_server.engine.micro_batch import IGNORED_LABEL
from horizon_server.errors import InvalidData
from horizon_server.planning.data_size import counted_steps
from horizon_server.spec import parse_job_spec
from horizon_server.store import row_packing


def dataset_of(lengths: list[int], *, seed: int = 0) -> PreparedDataset:
    """Token t of the dataset has id t, so a micro-batch tells where each of its tokens came from."""
    num_tokens = sum(lengths)
    return PreparedDataset(
        input_ids_N=np.arange(num_tokens, dtype=np.int32),
        trained_N=np.random.default_rng(seed).integers(0, 2, num_tokens, dtype=np.uint8),
        document_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        report={},
    )


plans = st.fixed_dictionaries(
    {
        "sequence_length": st.integers(12, 40),
        "tokens_per_step": st.integers(5, 100),
        "packing": st.booleans(),
        "packing_limit": st.none() | st.integers(10, 50),
        "seed": st.integers(0, 3),
        "shuffle": st.booleans(),
    }
)
lengths_lists = st.lists(st.integers(1, 12), min_size=1, max_size=60)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=60).filter(lambda found: len(found) % 2 == 0),
    epochs=st.sampled_from([0.3, 1, 2.5]),
    packing=st.booleans(),
    group_size=st.sampled_from([1, 2]),
    tokens=st.integers(8, 100),
)
def test_the_steps_that_a_plan_counts_are_those_of_the_worker(lengths, epochs, packing, group_size, tokens):  # type: ignore[no-untyped-def]
    spec = {"epochs": epochs, "sequence_length": 20, "tokens_per_step": max(tokens, 20), "packing": packing, "seed": 3}
    train = parse_job_spec({"name": "j", "model": "m", "dataset": "d", "train": spec}).train
    counted = counted_steps(np.array(lengths), train, group_size=group_size)
    plan = StepPlan(
        dataset_of(lengths),
        epochs=epochs,
        sequence_length=20,
        tokens_per_step=max(tokens, 20),
        packing=packing,
        seed=3,
        group_size=group_size,
    )
    assert counted == plan.num_steps


@settings(max_examples=60)
@given(lengths=lengths_lists, options=plans, epochs=st.integers(1, 3))
def test_every_epoch_holds_every_token_once_within_the_limits(lengths, options, epochs):  # type: ignore[no-untyped-def]
    dataset = dataset_of(lengths)
    plan = StepPlan(dataset, epochs=epochs, **options)
    seen: list[int] = []
    for i in range(plan.num_steps):
        rows = plan.step(i)
        tokens = sum(row.num_tokens for row in rows)
        assert tokens <= options["tokens_per_step"] or len(rows) == 1
        assert all(row.num_tokens <= options["sequence_length"] for row in rows)
        longest = options["packing_limit"] or options["sequence_length"]
        packed = [row for row in rows if len(row.document_lengths) > 1]
        assert all(row.num_tokens <= longest for row in packed)
        assert options["packing"] or not packed
        seen += [int(token) for row in rows for token in row.input_ids_T]
        if plan.epoch_of(i) == int(plan.epoch_of(i)):
            assert sorted(seen) == list(range(sum(lengths)))
            seen = []
    assert not seen
    assert plan.epoch_of(plan.num_steps - 1) == epochs


@settings(max_examples=40)
@given(lengths=lengths_lists, options=plans)
def test_labels_are_the_next_trained_token_of_the_same_document(lengths, options):  # type: ignore[no-untyped-def]
    dataset = dataset_of(lengths, seed=1)
    trained = np.random.default_rng(1).integers(0, 2, sum(lengths), dtype=np.uint8)
    first_tokens = set(np.concatenate([[0], np.cumsum(lengths)]).tolist())
    plan = StepPlan(dataset, epochs=1, **options)
    num_targets = 0
    for i in range(plan.num_steps):
        for row in plan.step(i):
            for token, position, label in zip(row.input_ids_T, row.position_ids_T, row.labels_T, strict=True):
                follower = int(token) + 1
                is_target = follower not in first_tokens and trained[follower] == 1
                assert int(label) == (follower if is_target else IGNORED_LABEL)
                assert int(position) == int(token) - max(start for start in first_tokens if start <= int(token))
            num_targets += row.num_targets
    assert num_targets == sum(int(trained[t]) for t in range(sum(lengths)) if t not in first_tokens)


@settings(max_examples=30)
@given(lengths=lengths_lists, options=plans, draw=st.data())
def test_a_step_depends_on_its_number_only(lengths, options, draw):  # type: ignore[no-untyped-def]
    dataset = dataset_of(lengths)
    in_order = StepPlan(dataset, max_steps=12, **options)
    expected = [in_order.documents_of(i) for i in range(12)]
    jumping = StepPlan(dataset, max_steps=12, **options)
    for i in draw.draw(st.permutations(range(12))):
        assert jumping.documents_of(i) == expected[i]
    assert [in_order.epoch_of(i) for i in range(12)] == sorted(in_order.epoch_of(i) for i in range(12))


def test_epochs_and_seeds_differ_and_evaluation_keeps_the_files_order() -> None:
    dataset = dataset_of([3] * 50)

    def order(plan: StepPlan) -> list[int]:
        return [document for i in range(plan.num_steps) for row in plan.documents_of(i) for document in row]

    two_epochs = order(StepPlan(dataset, sequence_length=3, tokens_per_step=9, epochs=2, seed=0))
    assert two_epochs[:50] != two_epochs[50:]
    assert two_epochs[:50] != order(StepPlan(dataset, sequence_length=3, tokens_per_step=9, epochs=1, seed=1))
    unshuffled = StepPlan(dataset, sequence_length=3, tokens_per_step=9, epochs=1, shuffle=False)
    assert order(unshuffled) == list(range(50))


def test_a_fraction_of_an_epoch_takes_that_share_of_its_steps() -> None:
    dataset = dataset_of([3] * 40)

    def steps(epochs: float) -> int:
        return StepPlan(dataset, sequence_length=3, tokens_per_step=12, epochs=epochs).num_steps

    assert [steps(epochs) for epochs in (0.01, 0.5, 1, 1.0, 2.5)] == [1, 5, 10, 10, 25]


@settings(max_examples=60)
@given(lengths=lengths_lists, options=plans, at_once=st.integers(1, 9))
def test_looking_at_few_rows_at_once_changes_nothing(lengths, options, at_once):  # type: ignore[no-untyped-def]
    whole = StepPlan(dataset_of(lengths), epochs=2, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_packing, "_ROWS_AT_ONCE", at_once)
        pieces = StepPlan(dataset_of(lengths), epochs=2, **options)
        assert pieces.num_steps == whole.num_steps
        assert [pieces.documents_of(i) for i in range(pieces.num_steps)] == [
            whole.documents_of(i) for i in range(whole.num_steps)
        ]


@settings(max_examples=60)
@given(lengths=lengths_lists, options=plans)
def test_a_step_ends_only_where_the_next_row_does_not_fit(lengths, options):  # type: ignore[no-untyped-def]
    plan = StepPlan(dataset_of(lengths), epochs=1, **options)
    steps = [plan.step(i) for i in range(plan.num_steps)]
    for step, following in itertools.pairwise(steps):
        tokens = sum(row.num_tokens for row in step)
        assert tokens + following[0].num_tokens > options["tokens_per_step"]


def test_best_fit_fills_rows_nearly_full() -> None:
    lengths = np.random.default_rng(0).integers(20, 400, 3000).tolist()
    plan = StepPlan(dataset_of(lengths), sequence_length=1024, tokens_per_step=16384, epochs=1)
    assert plan.packing_efficiency > 0.98
    unpacked = StepPlan(dataset_of(lengths), sequence_length=1024, tokens_per_step=16384, epochs=1, packing=False)
    assert unpacked.packing_efficiency < 0.3


def write_prepared(folder: Path, **changes: NDArray[Any]) -> Path:
    planes: dict[str, NDArray[Any]] = {
        "input_ids": np.array([5, 6, 7, 8, 9], dtype=np.int32),
        "trained": np.array([0, 1, 1, 0, 1], dtype=np.uint8),
        "document_starts": np.array([0, 3, 5], dtype=np.int64),
    }
    save_file(planes | changes, folder / "tokens.safetensors")
    (folder / "report.json").write_text(json.dumps({"kind": "text", "rows": 2}))
    return folder


def test_opens_what_preparation_wrote(tmp_path: Path) -> None:
    dataset = PreparedDataset.open(write_prepared(tmp_path))
    assert (dataset.num_documents, dataset.num_tokens) == (2, 5)
    assert dataset.report == {"kind": "text", "rows": 2}
    row = dataset.micro_batch([1, 0])
    assert torch.equal(row.input_ids_T, torch.tensor([8, 9, 5, 6, 7]))
    assert torch.equal(row.labels_T, torch.tensor([9, -100, 6, 7, -100]))
    assert torch.equal(row.position_ids_T, torch.tensor([0, 1, 0, 1, 2]))
    assert row.document_lengths == (2, 3)


def test_refuses_folders_that_are_not_prepared_datasets(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="is not a prepared dataset"):
        PreparedDataset.open(tmp_path)
    with pytest.raises(InvalidData, match="input_ids is I64, expected I32"):
        PreparedDataset.open(write_prepared(tmp_path, input_ids=np.arange(5)))
    with pytest.raises(InvalidData, match="differ in length"):
        PreparedDataset.open(write_prepared(tmp_path, trained=np.zeros(4, dtype=np.uint8)))
    with pytest.raises(InvalidData, match="do not increase"):
        PreparedDataset.open(write_prepared(tmp_path, document_starts=np.array([0, 5, 5])))
    with pytest.raises(InvalidData, match="holds no documents"):
        PreparedDataset.open(write_prepared(tmp_path, document_starts=np.array([0])))


def test_refuses_documents_longer_than_the_sequence() -> None:
    with pytest.raises(InvalidData, match=r"documents of up to 9 tokens, train\.sequence_length is 8"):
        StepPlan(dataset_of([4, 9]), sequence_length=8, tokens_per_step=8, epochs=1)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=60).filter(lambda lengths: len(lengths) % 2 == 0),
    options=plans,
)
def test_pairs_stay_together_in_every_step(lengths: list[int], options: dict[str, Any]) -> None:
    dataset = dataset_of(lengths)
    plan = StepPlan(dataset, epochs=2, group_size=2, **options)
    limit = min(options["sequence_length"], options["tokens_per_step"], options["packing_limit"] or 50)
    seen: list[int] = []
    for i in range(plan.num_steps):
        rows = plan.documents_of(i)
        documents = [document for row in rows for document in row]
        seen += documents
        for chosen, rejected in zip(documents[::2], documents[1::2], strict=True):
            assert chosen % 2 == 0
            assert rejected == chosen + 1
        assert all(len(row) == 1 or sum(lengths[document] for document in row) <= limit for row in rows)
        assert options["packing"] or all(len(row) == 1 for row in rows)
        tokens = sum(lengths[document] for document in documents)
        assert tokens <= options["tokens_per_step"] or len(documents) == 2
    assert sorted(seen) == sorted(2 * list(range(len(lengths))))


def test_documents_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(InvalidData, match="3 documents, which are no groups of 2"):
        StepPlan(dataset_of([1, 2, 3]), sequence_length=8, tokens_per_step=8, epochs=1, group_size=2)


def test_the_digest_of_an_order_sees_a_change_of_a_later_epoch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(changed: int = -1) -> str:
        def other(seed: int, epoch: int, what: int) -> row_packing.Keys:
            return keys(seed, epoch + 1000 if epoch >= changed > 0 else epoch, what)

        keys = row_packing.permutation_keys
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_packing, "permutation_keys", other)
            return StepPlan(dataset_of([3] * 50), sequence_length=3, tokens_per_step=9, epochs=7).digest()

    assert digest() == digest()
    assert all(digest(changed) != digest() for changed in range(1, 7))


def test_the_digest_of_an_order_looks_at_few_epochs_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = set()
    order = row_packing.EpochSteps._order

    def seen(self: row_packing.EpochSteps, epoch: int, begin: int, end: int) -> NDArray[np.int64]:
        epochs.add(epoch)
        return order(self, epoch, begin, end)

    monkeypatch.setattr(row_packing.EpochSteps, "_order", seen)
    StepPlan(dataset_of([3] * 9), sequence_length=3, tokens_per_step=9, max_steps=3_000_000).digest()
    assert (len(epochs), max(epochs)) == (22, 999_999)
