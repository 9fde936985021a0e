"""The job spec: defaults, limits, and violations that name the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizon_server.errors import InvalidSpec
from horizon_server.spec import CheckpointSpec, JobSpec, Span, TrainSpec, parse_job_spec
from horizon_server.spec.fields import (
    MAX_EXPRESSION_CHARS,
    MAX_EXPRESSIONS,
    MAX_LANES,
    MAX_LR_SCALE,
    MAX_METADATA,
    MAX_METADATA_NAME_CHARS,
    MAX_METADATA_TEXT_CHARS,
    MAX_ROW_TOKENS,
)

MINIMAL = {"name": "a", "model": "m", "dataset": "d"}


def violations(plain: Any) -> dict[str, str]:
    with pytest.raises(InvalidSpec) as caught:
        parse_job_spec(plain)
    return {violation.field: violation.description for violation in caught.value.violations}


def test_a_minimal_spec_takes_the_documented_defaults() -> None:
    spec = parse_job_spec(MINIMAL)
    assert spec == JobSpec(name="a", model="m", dataset="d", train=TrainSpec(epochs=1.0))
    assert (spec.train.learning_rate, spec.train.max_grad_norm, spec.checkpoint.keep_last) == (1e-5, 1.0, 2)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"train": {"learning_rate": "fast"}}, "train.learning_rate"),
        ({"train": {"learning_rate": float("nan")}}, "train.learning_rate"),
        ({"train": {"sequence_length": 0}}, "train.sequence_length"),
        ({"train": {"sequence_length": True}}, "train.sequence_length"),
        ({"train": {"betas": [0.9]}}, "train.betas"),
        ({"train": {"betas": [0.9, 1.0]}}, "train.betas"),
        ({"train": {"max_grad_norm": 0}}, "train.max_grad_norm"),
        ({"train": {"packing": "maybe"}}, "train.packing"),
        ({"train": {"lr_schedul": "cosine"}}, "train.lr_schedul"),
        ({"train": {"min_lr_ratio": 0.1}}, "train.min_lr_ratio"),
        ({"train": {"min_lr_ratio": 1.1, "lr_schedule": "wsd"}}, "train.min_lr_ratio"),
        ({"train": {"lr_schedule": "cosine_with_min_lr", "lr_decay_ratio": 0.2}}, "train.lr_decay_ratio"),
        ({"train": {"lr_schedule": "exponential", "min_lr_ratio": 0.2}}, "train.lr_schedule"),
        ({"train": {"lr_groups": [{"match": "norm", "scale": 0}]}}, "train.lr_groups"),
        ({"train": {"lr_groups": [{"match": "norm"}]}}, "train.lr_groups"),
        ({"train": {"lr_groups": [{"match": "norm", "scale": 1, "lr": 1}]}}, "train.lr_groups"),
        ({"train": {"lr_groups": [{"match": "a(", "scale": 1}]}}, "train.lr_groups"),
        ({"train": {"lr_groups": [7]}}, "train.lr_groups"),
        ({"train": {"lr_groups": "norm"}}, "train.lr_groups"),
        ({"train": {"neftune_noise_alpha": -1}}, "train.neftune_noise_alpha"),
        ({"init_from": "job@"}, "init_from"),
        ({"init_from": "job@newest"}, "init_from"),
        ({"init_from": "../job@1"}, "init_from"),
        ({"train": {"label_smoothing": 1.0}}, "train.label_smoothing"),
        ({"train": {"epochs": 1, "max_steps": 5}}, "train.max_steps"),
        ({"train": {"max_skipped_steps": 0}}, "train.max_skipped_steps"),
        ({"train": 3}, "train"),
        ({"eval_fraction": 1}, "eval_fraction"),
        ({"eval_fraction": -0.1}, "eval_fraction"),
        ({"eval_fraction": float("nan")}, "eval_fraction"),
        ({"eval_fraction": True}, "eval_fraction"),
        ({"eval_fraction": 0.1, "eval_dataset": "e"}, "eval_fraction"),
        ({"checkpoint": {"keep_last": 0}}, "checkpoint.keep_last"),
        ({"method": "ppo"}, "method"),
        ({"dpo": {"beta": 0.2}}, "dpo"),
        ({"method": "ipo", "dpo": {"loss": "hinge"}}, "dpo"),
        ({"method": "dpo", "dpo": {"beta": 0}}, "dpo.beta"),
        ({"method": "dpo", "dpo": {"loss": "ipo"}}, "dpo.loss"),
        ({"method": "dpo", "dpo": {"loss": "hinge", "label_smoothing": 0.1}}, "dpo.label_smoothing"),
        ({"method": "dpo", "train": {"label_smoothing": 0.1}}, "train.label_smoothing"),
        ({"method": "kto", "train": {"train_on": "all"}}, "train.train_on"),
        ({"method": "kto", "kto": {"desirable": 1.5}}, "kto.desirable"),
        ({"method": "policy", "policy": {"clip": False, "clip_high": 0.3}}, "policy.clip_high"),
        ({"name": "../up"}, "name"),
        ({"model": ""}, "model"),
        ({"device": "tpu"}, "device"),
        ({"colour": "red"}, "colour"),
        ({"priority": 101}, "priority"),
        ({"limits": {"max_hours": 0}}, "limits.max_hours"),
        ({"limits": {"max_steps": 0}}, "limits.max_steps"),
        ({"limits": {"max_step": 9}}, "limits.max_step"),
        ({"eval": {"patience": -1}}, "eval.patience"),
        ({"train": {"trainable": []}}, "train.trainable"),
        ({"train": {"trainable": ["norm", "(bias"]}}, "train.trainable"),
        ({"train": {"trainable": ["n" * 257]}}, "train.trainable"),
        ({"train": {"trainable": ["norm"] * 65}}, "train.trainable"),
        ({"train": {"trainable": 3}}, "train.trainable"),
        ({"eval": {"min_delta": -0.5}}, "eval.min_delta"),
        ({"eval": {"patience": 2}, "eval_fraction": 0.1}, "eval.patience"),
        ({"eval": {"patience": 2}, "eval_every_steps": 5}, "eval.patience"),
        ({"eval": {"patience": 2}, "eval_every_steps": -5, "eval_dataset": "e"}, "eval_every_steps"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(change: dict[str, Any], field: str) -> None:
    found = violations({**MINIMAL, **change})
    assert list(found) == [field]
    assert found[field].startswith(field)


def test_one_expression_need_not_be_a_list() -> None:
    specs = [parse_job_spec({**MINIMAL, "train": {"trainable": given}}) for given in ("norm", ["norm"], "all")]
    assert [spec.train.trainable for spec in specs] == [("norm",), ("norm",), ("all",)]
    assert parse_job_spec(MINIMAL).train.trainable == ("all",)


def test_all_violations_are_told_at_once() -> None:
    assert set(violations({"name": "a b", "train": {"eps": 0, "x": 1}})) == {
        "name",
        "model",
        "dataset",
        "train.eps",
        "train.x",
    }


def test_a_field_in_the_wrong_section_is_sent_to_its_own() -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_job_spec({"name": "n", "model": "m", "dataset": "d", "learning_rate": 1e-4, "train": {"name": "n"}})
    assert {violation.description for violation in caught.value.violations} == {
        "learning_rate is not a field of the job spec; did you mean train.learning_rate?",
        "train.name is not a field of the job spec; did you mean name?",
    }


def test_patience_needs_evaluations_between_steps_and_data_for_them() -> None:
    wanted = {**MINIMAL, "eval": {"patience": 2}, "eval_every_steps": 5}
    assert violations({**wanted, "eval_every_steps": 0}) == {
        "eval.patience": "eval.patience is 2 evaluations, but there are none between steps; set eval_every_steps above "
        "0"
    }
    assert violations(wanted) == {
        "eval.patience": "eval.patience is 2 evaluations, but there is no data for them; set eval_dataset or "
        "eval_fraction"
    }
    for data in ({"eval_dataset": "e"}, {"eval_fraction": 0.1}):
        assert parse_job_spec({**wanted, **data}).eval.patience == 2


def test_limits_are_off_by_default_and_a_section_left_empty_is_the_default() -> None:
    spec = parse_job_spec({**MINIMAL, "limits": None, "eval": None})
    assert (spec.limits.max_hours, spec.limits.max_steps, spec.eval.patience) == (None, None, 0)


def test_the_parts_of_a_schedule_belong_to_it() -> None:
    found = violations({**MINIMAL, "train": {"lr_decay_ratio": 0.2}})
    assert found == {
        "train.lr_decay_ratio": "train.lr_decay_ratio is 0.2, and lr_schedule cosine does not use it; leave it out or "
        "set train.lr_schedule to wsd"
    }
    train = parse_job_spec({**MINIMAL, "train": {"lr_schedule": "wsd", "min_lr_ratio": 0.1}}).train
    assert (train.min_lr_ratio, train.lr_decay_ratio) == (0.1, 0.1)


def test_learning_rate_groups_and_their_expressions_are_bounded() -> None:
    def of(match: str, scale: float, number: int = 1) -> dict[str, Any]:
        return {**MINIMAL, "train": {"lr_groups": [{"match": match, "scale": scale}] * number}}

    allowed = of("x" * MAX_EXPRESSION_CHARS, MAX_LR_SCALE, MAX_EXPRESSIONS)
    assert len(parse_job_spec(allowed).train.lr_groups) == MAX_EXPRESSIONS
    for refused in (
        of("x", 1.0, MAX_EXPRESSIONS + 1),
        of("x" * (MAX_EXPRESSION_CHARS + 1), 1.0),
        of("x", MAX_LR_SCALE + 1.0),
    ):
        assert "scale (a number above 0 up to 1000" in violations(refused)["train.lr_groups"]
    assert (
        "holds 'a(', which is not a regular expression that can be used (syntax of RE2): missing ): a("
        in violations(of("a(", 1.0))["train.lr_groups"]
    )


def test_notes_of_a_job_are_bounded() -> None:
    full = {f"{i:x>{MAX_METADATA_NAME_CHARS}}": "x" * MAX_METADATA_TEXT_CHARS for i in range(MAX_METADATA)}
    assert parse_job_spec({**MINIMAL, "metadata": full}).metadata == full
    for refused, words in (
        (full | {"one more": ""}, "a mapping of up to 16 names of 1 to 64 characters to texts of up to 512"),
        ({"": "x"}, "has the name ''; a name must have 1 to 64 characters"),
        ({"x" * 65: "x"}, "a name must have 1 to 64 characters"),
        ({"x": "x" * 513}, "has 513 characters under 'x'; a text may have 512"),
    ):
        assert words in violations({**MINIMAL, "metadata": refused})["metadata"]
    assert "must be" in violations({**MINIMAL, "metadata": {"x": 1}})["metadata.x"]


def test_null_turns_clipping_off() -> None:
    assert parse_job_spec({**MINIMAL, "train": {"max_grad_norm": None}}).train.max_grad_norm is None


def test_yaml_booleans_are_packing_values() -> None:
    assert parse_job_spec({**MINIMAL, "train": {"packing": False}}).train.packing == "false"


@pytest.mark.parametrize("plain", [None, [], "name: a", 3])
def test_anything_but_a_mapping_is_refused(plain: object) -> None:
    with pytest.raises(InvalidSpec, match="must be a mapping"):
        parse_job_spec(plain)


@given(
    st.builds(
        JobSpec,
        name=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True),
        model=st.just("m"),
        dataset=st.just("d"),
        eval_dataset=st.sampled_from([None, "held-out"]),
        method=st.sampled_from(["sft", "pretrain"]),
        priority=st.integers(-100, 100),
        checkpoint=st.builds(CheckpointSpec, every_steps=st.integers(0, 1000), keep_best=st.booleans()),
        train=st.builds(
            TrainSpec,
            epochs=st.just(None),
            max_steps=st.integers(1, 1000),
            learning_rate=st.floats(0, 1),
            max_grad_norm=st.one_of(st.none(), st.floats(0.1, 10)),
            packing=st.sampled_from(["auto", "true", "false"]),
            betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.999)),
        ),
    )
)
def test_a_spec_survives_being_written_and_read(spec: JobSpec) -> None:
    assert parse_job_spec(spec.to_mapping()) == spec


def test_a_method_takes_its_own_options_and_the_defaults_of_all_others() -> None:
    spec = parse_job_spec({**MINIMAL, "method": "dpo", "dpo": {"beta": 0.2}, "kto": None})
    assert (spec.dpo.beta, spec.dpo.loss, spec.ipo.length_normalised, spec.kto.beta) == (0.2, "sigmoid", True, 0.1)
    assert parse_job_spec(spec.to_mapping()) == spec


def test_options_of_another_method_are_refused_with_what_to_do() -> None:
    found = violations({**MINIMAL, "method": "kto", "dpo": {"beta": 0.2}})
    assert found == {"dpo": "dpo has options of method dpo, and the job's method is kto; remove dpo or set method: dpo"}


@pytest.mark.parametrize(
    ("method", "options", "needs"),
    [
        ("sft", {}, False),
        ("dpo", {}, True),
        ("ipo", {}, True),
        ("orpo", {}, False),
        ("simpo", {}, False),
        ("kto", {}, True),
        ("policy", {}, False),
        ("policy", {"policy": {"kl_coefficient": 0.1}}, True),
    ],
)
def test_which_methods_compare_with_the_starting_weights(method: str, options: dict[str, Any], needs: bool) -> None:
    assert parse_job_spec({**MINIMAL, "method": method, **options}).needs_references is needs


def test_devices_and_lanes_are_bounded_and_lanes_are_a_power_of_two() -> None:
    assert (parse_job_spec(MINIMAL).gpus, parse_job_spec(MINIMAL).train.lanes) == (Span(), None)
    most = parse_job_spec({**MINIMAL, "gpus": MAX_LANES, "train": {"lanes": MAX_LANES}})
    assert (most.gpus, most.train.lanes) == (Span(least=MAX_LANES, most=MAX_LANES), MAX_LANES)
    for gpus in (0, MAX_LANES + 1, "2", True):
        assert "it must be a whole number from 1 to 64" in violations({**MINIMAL, "gpus": gpus})["gpus"]


def test_rows_are_bounded() -> None:
    longest = parse_job_spec({**MINIMAL, "train": {"sequence_length": MAX_ROW_TOKENS, "tokens_per_step": 1 << 23}})
    assert longest.train.sequence_length == MAX_ROW_TOKENS
    for name in ("sequence_length", "chunk_tokens"):
        found = violations({**MINIMAL, "train": {name: MAX_ROW_TOKENS + 1, "tokens_per_step": 1 << 23}})
        assert str(MAX_ROW_TOKENS) in found[f"train.{name}"], found


def test_nodes_are_bounded() -> None:
    assert parse_job_spec(MINIMAL).nodes == Span()
    assert parse_job_spec({**MINIMAL, "nodes": MAX_LANES}).nodes == Span(least=MAX_LANES, most=MAX_LANES)
    for nodes in (0, MAX_LANES + 1, "2", True):
        assert "it must be a whole number from 1 to 64" in violations({**MINIMAL, "nodes": nodes})["nodes"]


@pytest.mark.parametrize("field", ["gpus", "nodes"])
def test_a_range_is_a_text_of_two_numbers_the_smaller_first(field: str) -> None:
    spec = parse_job_spec({**MINIMAL, field: "2-8"})
    found = getattr(spec, field)
    assert (found, found.plain, found.is_range) == (Span(least=2, most=8), "2-8", True)
    assert (spec.to_mapping()[field], spec.given()[field]) == ("2-8", "2-8")
    assert parse_job_spec(spec.to_mapping()) == spec
    exact = parse_job_spec({**MINIMAL, field: "4-4"})
    assert exact == parse_job_spec({**MINIMAL, field: 4})
    assert (exact.to_mapping()[field], getattr(exact, field).is_range) == (4, False)
    assert "the smaller number comes first: use 2-8" in violations({**MINIMAL, field: "8-2"})[field]
    for wrong in ("0-2", "1-65", "2-", "-2", "2 - 8", "2-8-9", "1-999", [1, 2]):
        assert "or a range of them such as 2-8" in violations({**MINIMAL, field: wrong})[field]


def test_the_numbers_of_a_range_are_those_that_the_node_has() -> None:
    gpus = Span(least=2, most=8)
    assert [list(gpus.within(num)) for num in (1, 2, 4, 64)] == [[], [2], [2, 3, 4], [2, 3, 4, 5, 6, 7, 8]]
    assert [gpus.at_most(num).plain for num in (6, 2, 1)] == ["2-6", 2, 1]
    assert Span(least=8, most=8).at_most(3).plain == 3
    for lanes in (0, 3, 12, 2 * MAX_LANES, 2.0):
        message = f"train.lanes is {lanes}; it must be a power of two from 1 to 64, or null"
        assert violations({**MINIMAL, "train": {"lanes": lanes}}) == {"train.lanes": message}
