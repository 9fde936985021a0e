"""What OpenAI's hyperparameters mean in a job's spec, and back."""

from __future__ import annotations

from typing import Any

import pytest

from horizon_server.api.openai.tuning import LEAST_STEPS, Inputs, JobBody, hyperparameters_of, spec_of
from horizon_server.errors import InvalidSpec
from horizon_server.records.blob import EMPTY_SHA256, BlobFile, DatasetRecord
from horizon_server.spec import JobSpec, parse_job_spec


def record(num_rows: int, bytes_of_row: int, form: str = "messages") -> DatasetRecord:
    file = BlobFile(path="a.jsonl", sha256=EMPTY_SHA256, size_bytes=num_rows * bytes_of_row)
    return DatasetRecord(
        dataset_id="dataset_1", owner="ann", name="a", files=(file,), format=form, field_map={}, num_rows=num_rows
    )


def asked(
    training: DatasetRecord, positions: int = 100_000, train: dict[str, Any] | None = None, **body: Any
) -> JobSpec:
    whole = JobBody.model_validate({"model": "m", "training_file": "file-1", **body})
    inputs = Inputs(
        model="m", init_from=None, training=training, validation=None, positions=positions, train=train or {}
    )
    return spec_of(whole, inputs)


@pytest.mark.parametrize(
    ("num_rows", "epochs"), [(1, 25), (10, 10), (33, 3), (34, 3), (8_333, 3), (8_334, 2), (12_500, 2), (60_000, 1)]
)
def test_auto_epochs_follow_the_number_of_examples(num_rows: int, epochs: int) -> None:
    spec = asked(record(num_rows, 400))
    assert spec.train.epochs == epochs
    assert hyperparameters_of(spec, record(num_rows, 400))["n_epochs"] == epochs


def test_an_auto_batch_leaves_enough_steps_and_is_our_own_of_much_data() -> None:
    few = asked(record(100, 400)).train
    assert few.epochs is not None
    tokens = 100 * 100 * few.epochs
    assert tokens // few.tokens_per_step >= LEAST_STEPS
    assert few.warmup_steps == 5
    much = asked(record(100_000, 400)).train
    assert (much.tokens_per_step, much.warmup_steps) == (16384, 10)
    # One example at least.
    assert asked(record(3, 40_000)).train.tokens_per_step >= 10_000


@pytest.mark.parametrize("form", ["messages", "preference"])
@pytest.mark.parametrize("batch_size", [1, 4, 250])
def test_a_batch_comes_back_as_it_was_asked_for(form: str, batch_size: int) -> None:
    training = record(77, 403, form)
    spec = asked(training, hyperparameters={"batch_size": batch_size})
    assert hyperparameters_of(spec, training)["batch_size"] == batch_size


def test_both_answers_of_a_preference_have_its_prompt() -> None:
    one, two = (asked(record(100, 400, form), hyperparameters={"batch_size": 8}) for form in ("messages", "preference"))
    assert (one.train.tokens_per_step, two.train.tokens_per_step) == (800, 1200)


@pytest.mark.parametrize("multiplier", [0.1, 1.0, 1.8, 3.0])
def test_the_multiplier_is_of_a_rate_for_what_is_trained(multiplier: float) -> None:
    training = record(100, 400)
    given = {"learning_rate_multiplier": multiplier}
    whole = asked(training, hyperparameters=given)
    adapter = asked(training, train={"trainable": ["lora"]}, hyperparameters=given)
    assert (whole.train.learning_rate, adapter.train.learning_rate) == pytest.approx(
        (multiplier / 1e5, multiplier / 1e4)
    )
    for spec in (whole, adapter):
        assert hyperparameters_of(spec, training)["learning_rate_multiplier"] == multiplier


def test_rows_are_as_long_as_the_model_allows_up_to_a_limit() -> None:
    assert asked(record(10, 10), positions=1000).train.sequence_length == 1000
    assert asked(record(10, 10)).train.sequence_length == 4096


def test_fields_of_ours_go_over_what_is_computed() -> None:
    spec = asked(
        record(10, 100),
        horizon={
            "priority": 3,
            "train": {"tokens_per_step": 512, "max_steps": 7, "learning_rate": 1.0},
            "checkpoint": {"keep_last": 5},
        },
    )
    assert (spec.priority, spec.checkpoint.keep_last) == (3, 5)
    assert (spec.train.tokens_per_step, spec.train.max_steps, spec.train.epochs) == (512, 7, None)
    assert spec.train.learning_rate == 1.0
    with pytest.raises(InvalidSpec, match="must be an object"):
        asked(record(10, 100), horizon={"train": 3})


def test_what_other_jobs_have_is_shown_as_far_as_it_has_a_name() -> None:
    spec = parse_job_spec({"name": "a", "model": "m", "dataset": "d", "train": {"max_steps": 5}})
    assert hyperparameters_of(spec, None) == {
        "n_epochs": "auto",
        "batch_size": "auto",
        "learning_rate_multiplier": 1.0,
    }
    spec = parse_job_spec({"name": "a", "model": "m", "dataset": "d", "train": {"epochs": 0.5}})
    assert hyperparameters_of(spec, None)["n_epochs"] == "auto"
    spec = parse_job_spec({"name": "a", "model": "m", "dataset": "d", "method": "dpo", "dpo": {"beta": 0.3}})
    assert hyperparameters_of(spec, None) == {
        "n_epochs": 1,
        "batch_size": "auto",
        "learning_rate_multiplier": 1.0,
        "beta": 0.3,
    }
