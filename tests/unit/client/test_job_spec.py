"""Job spec, mapping <-> wire: every field both ways, unknown keys and wrong types by path, overrides, files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizon_client import BadFile, InvalidRequest
from horizon_client.conversion import spec_to_mapping, spec_to_proto
from horizon_client.errors import InvalidSpec
from horizon_client.job_spec import load_spec_file, parse_spec, with_overrides
from horizon_proto.v1 import job_pb2

MINIMAL = {"name": "n", "model": "m", "dataset": "d"}

_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
_int64 = st.integers(-(2**63), 2**63 - 1)
_doubles = st.floats(allow_nan=False, allow_infinity=False)

_train = st.fixed_dictionaries(
    {},
    optional={
        "epochs": _doubles,
        "max_steps": _int64,
        "sequence_length": _int64,
        "tokens_per_step": _int64,
        "packing": st.sampled_from(["auto", "true", "false"]),
        "learning_rate": _doubles,
        "lr_schedule": st.sampled_from(["constant", "linear", "cosine", "cosine_with_min_lr", "wsd"]),
        "min_lr_ratio": _doubles,
        "lr_decay_ratio": _doubles,
        "label_smoothing": _doubles,
        "neftune_noise_alpha": _doubles,
        "lr_groups": st.lists(st.fixed_dictionaries({"match": _names, "scale": _doubles}), min_size=1, max_size=2),
        "warmup_steps": _int64,
        "weight_decay": _doubles,
        "betas": st.lists(_doubles, min_size=1, max_size=3),
        "eps": _doubles,
        "max_grad_norm": st.none() | _doubles,
        "seed": _int64,
        "train_on": st.sampled_from(["assistant", "last-assistant", "all"]),
        "max_skipped_steps": _int64,
        "decay": st.sampled_from(["trainer", "matrices", "all"]),
        "compute_dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
        "compile": st.sampled_from(["auto", "on", "off"]),
        "matmul": st.sampled_from(["bf16", "fp8", "fp8_full"]),
        "deterministic": st.booleans(),
        "chunk_tokens": _int64,
        "optimizer_states": st.sampled_from(["exact", "compressed"]),
        "lanes": st.integers(1, 64),
        "parallel": st.sampled_from(["auto", "rows", "layers"]),
    },
)
_checkpoint = st.fixed_dictionaries(
    {},
    optional={
        "every_steps": _int64,
        "keep_last": _int64,
        "keep_best": st.booleans(),
        "dtype": st.sampled_from(["source", "bf16", "fp16", "fp32"]),
    },
)
_specs = st.fixed_dictionaries(
    {"name": _names, "model": _names, "dataset": _names},
    optional={
        "project": _names,
        "init_from": _names,
        "eval_dataset": _names,
        "method": st.sampled_from(["sft", "pretrain", "dpo", "ipo", "orpo", "simpo", "kto", "policy"]),
        "dpo": st.fixed_dictionaries({"beta": _doubles}, optional={"loss": st.sampled_from(["sigmoid", "hinge"])}),
        "train": _train,
        "eval_every_steps": _int64,
        "checkpoint": _checkpoint,
        "priority": st.integers(-(2**31), 2**31 - 1),
        "device": st.sampled_from(["auto", "cuda", "host"]),
        "gpus": st.integers(1, 64) | st.sampled_from(["1-2", "2-64"]),
        "nodes": st.integers(1, 64) | st.sampled_from(["1-2", "2-64"]),
        "eval_fraction": _doubles,
        "memory": st.fixed_dictionaries(
            {},
            optional={
                "tier": st.sampled_from(["ram", "drive"]),
                "accept_wear": st.booleans(),
                "experts": st.sampled_from(["whole", "paged"]),
                "keep_attention_outputs": st.booleans(),
            },
        ),
        "report_to": st.lists(_names, min_size=1, max_size=3),
        "eval": st.fixed_dictionaries(
            {},
            optional={
                "sets": st.dictionaries(_names, _names, min_size=1, max_size=3),
                "generate": st.fixed_dictionaries({}, optional={"set": _names, "prompts": _int64, "answer": _names}),
                "best_by": _names,
            },
        ),
    },
)


@given(_specs)
def test_round_trip(mapping: dict[str, Any]) -> None:
    wire = spec_to_proto(mapping)
    assert spec_to_mapping(wire) == mapping
    assert spec_to_proto(spec_to_mapping(wire)) == wire


def test_property_covers_every_field_of_the_contract() -> None:
    full = {
        **MINIMAL,
        "project": "p",
        "init_from": "other@best",
        "metadata": {"a": "b"},
        "nodes": "2-4",
        "node": "box2",
        "eval_dataset": "e",
        "method": "pretrain",
        "train": {
            "epochs": 1.0,
            "max_steps": 2,
            "sequence_length": 3,
            "tokens_per_step": 4,
            "packing": "true",
            "learning_rate": 0.5,
            "lr_schedule": "linear",
            "chunk_tokens": 4096,
            "lanes": 8,
            "parallel": "layers",
            "wire": "bfloat16",
            "warmup_steps": 6,
            "weight_decay": 0.7,
            "betas": [0.8, 0.9],
            "eps": 1e-9,
            "max_grad_norm": 1.0,
            "seed": 11,
            "train_on": "last-assistant",
            "max_skipped_steps": 12,
            "decay": "matrices",
            "compute_dtype": "bfloat16",
            "compile": "off",
            "matmul": "fp8",
            "deterministic": True,
            "optimizer_states": "compressed",
            "trainable": ["norm"],
            "min_lr_ratio": 0.1,
            "lr_decay_ratio": 0.3,
            "label_smoothing": 0.1,
            "neftune_noise_alpha": 5.0,
            "lr_groups": [{"match": "norm", "scale": 0.5}, {"match": "embed", "scale": 2.0}],
            "lora": {
                "rank": 8,
                "alpha": 16.0,
                "dropout": 0.1,
                "targets": ["q_proj"],
                "rslora": True,
                "dora": True,
                "base": "nf4",
            },
        },
        "eval_every_steps": 12,
        "checkpoint": {"every_steps": 13, "keep_last": 14, "keep_best": False, "dtype": "fp32"},
        "priority": 15,
        "device": "host",
        "gpus": "2-8",
        "eval_fraction": 0.25,
        "eval": {
            "patience": 3,
            "min_delta": 0.5,
            "sets": {"a": "d", "b.c": "e"},
            "generate": {"set": "a", "prompts": 4, "max_new_tokens": 5, "answer": "(x)"},
            "best_by": "b.c.loss",
        },
        "limits": {"max_hours": 1.5, "max_steps": 7},
        "report_to": ["mlflow", "tensorboard"],
        "dpo": {"beta": 0.2, "loss": "hinge", "label_smoothing": 0.1, "length_normalised": True},
        "ipo": {"beta": 0.3, "length_normalised": False},
        "orpo": {"penalty": 0.4},
        "simpo": {"beta": 2.5, "gamma": 0.6, "label_smoothing": 0.2},
        "kto": {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 2.0},
        "policy": {"clip": False, "clip_low": 0.1, "clip_high": 0.3, "kl_coefficient": 0.04, "mean": "documents"},
        "session": {"idle_minutes": 3.0},
        "memory": {"tier": "ram", "accept_wear": True, "experts": "paged", "keep_attention_outputs": False},
    }
    wire = spec_to_proto(full)
    assert {f.name for f, _ in wire.ListFields()} == {f.name for f in job_pb2.JobSpec.DESCRIPTOR.fields}
    in_train = {f.name for f, _ in wire.train.ListFields()}
    assert in_train == {f.name for f in job_pb2.TrainSpec.DESCRIPTOR.fields} - {"no_clipping"}
    assert {f.name for f, _ in wire.eval.ListFields()} == {f.name for f in job_pb2.EvalSpec.DESCRIPTOR.fields}
    in_generate = {f.name for f, _ in wire.eval.generate.ListFields()}
    assert in_generate == {f.name for f in job_pb2.GenerateSpec.DESCRIPTOR.fields}
    assert wire.train.train_on == job_pb2.TRAIN_ON_LAST_ASSISTANT
    assert spec_to_mapping(wire) == full


@pytest.mark.parametrize("field", ["gpus", "nodes"])
def test_a_range_is_one_value_here_and_two_of_the_contract(field: str) -> None:
    most_of = f"max_{field}"
    for text in (f"{field}: 2-8", f"{field}: '2-8'", f'{field}: "2-8"'):
        wire = spec_to_proto({**MINIMAL, **parse_spec(text, name="job.yaml")})
        assert (getattr(wire, field), getattr(wire, most_of), spec_to_mapping(wire)[field]) == (2, 8, "2-8")
    one = spec_to_proto(with_overrides({**MINIMAL, field: "2-8"}, [f"{field}=4"]))
    has_most = one.HasField(most_of)  # type: ignore[arg-type]
    assert (getattr(one, field), has_most, spec_to_mapping(one)[field]) == (4, False, 4)
    for wrong in ("2-", "two", "2 - 8", "1-2-3"):
        with pytest.raises(InvalidSpec, match=rf"{field} is .*; it must be a whole number, or a range .* such as 2-8"):
            spec_to_proto({**MINIMAL, field: wrong})
    with pytest.raises(InvalidSpec, match=f"{most_of} is not a field of the job spec"):
        spec_to_proto({**MINIMAL, most_of: 8})


def test_null_turns_clipping_off_and_means_the_default_elsewhere() -> None:
    wire = spec_to_proto({**MINIMAL, "eval_dataset": None, "train": {"max_grad_norm": None, "learning_rate": None}})
    assert wire.train.no_clipping
    assert not wire.train.HasField("learning_rate")
    assert wire.eval_dataset == ""
    assert not spec_to_proto({**MINIMAL, "train": {"max_grad_norm": 0.5}}).train.no_clipping


def test_yaml_numbers_and_booleans() -> None:
    text = "name: n\nmodel: m\ndataset: d\ntrain: {learning_rate: 1e-5, max_steps: 1e3, packing: true, eps: 1}\n"
    train = spec_to_proto(parse_spec(text, name="job.yaml")).train
    assert (train.learning_rate, train.max_steps, train.eps) == (1e-5, 1000, 1.0)
    assert train.packing == job_pb2.PACKING_TRUE


def test_on_and_off_need_no_quotes_although_yaml_reads_booleans() -> None:
    """So does `--set train.compile=on`."""
    text = "name: n\nmodel: m\ndataset: d\ntrain: {compile: %s, packing: %s}\n"
    on, off = (spec_to_proto(parse_spec(text % (word, word), name="job.yaml")).train for word in ("on", "off"))
    assert (on.compile, off.compile) == (job_pb2.COMPILE_ON, job_pb2.COMPILE_OFF)
    assert (on.packing, off.packing) == (job_pb2.PACKING_TRUE, job_pb2.PACKING_FALSE)


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"lerning": 1}, "lerning", "not a field of the job spec; fields: name, project, model"),
        ({"train": {"no_clipping": True}}, "train.no_clipping", "not a field"),
        ({"learning_rate": 1e-4}, "learning_rate", "not a field of the job spec; did you mean train.learning_rate?"),
        ({"train": {"keep_last": 1}}, "train.keep_last", "did you mean checkpoint.keep_last?"),
        ({"train": {"lr": 1}}, "train.lr", "did you mean learning_rate?"),
        ({"train": {"qq": 1}}, "train.qq", "fields: epochs, max_steps"),
        ({"train": {"learning_rate": "fast"}}, "train.learning_rate", "is 'fast'; it must be a number"),
        ({"train": {"learning_rate": True}}, "train.learning_rate", "must be a number"),
        ({"train": {"learning_rate": math.nan}}, "train.learning_rate", "must be a finite number"),
        ({"train": {"learning_rate": 10**400}}, "train.learning_rate", "must be a finite number"),
        ({"train": {"max_steps": 1.5}}, "train.max_steps", "must be a whole number"),
        ({"train": {"max_steps": 2**70}}, "train.max_steps", "at most 64 bits"),
        ({"train": {"seed": False}}, "train.seed", "must be a whole number"),
        ({"train": {"lr_schedule": "Cosine"}}, "train.lr_schedule", "one of constant, linear, cosine"),
        ({"train": {"betas": 0.9}}, "train.betas", "must be a list"),
        ({"train": {"betas": ["a"]}}, "train.betas", "must be a number"),
        ({"train": {"lr_groups": ["norm"]}}, "train.lr_groups", "must be a list of mappings, each with match, scale"),
        ({"train": {"lr_groups": [{"scale": "x"}]}}, "train.lr_groups[0].scale", "must be a number"),
        ({"train": {"lr_groups": [{"math": "x"}]}}, "train.lr_groups[0].math", "did you mean"),
        ({"train": [1]}, "train", "must be a mapping with some of: epochs"),
        ({"checkpoint": {"keep_best": "yes"}}, "checkpoint.keep_best", "must be true or false"),
        ({"name": 12}, "name", "must be text; put it in quotes"),
        ({"name": "\ud800"}, "name", "valid Unicode"),
        ({"dataset": None}, "dataset", "dataset is required"),
        ({"priority": 2**31}, "priority", "at most 32 bits"),
        ({12: 1}, "12", "not a field"),
    ],
)
def test_refusals_name_path_value_and_what_is_allowed(change: dict[Any, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        spec_to_proto({**MINIMAL, **change})
    (violation,) = caught.value.violations
    assert violation.field == field
    assert violation.description.startswith(field)
    assert words in violation.description
    assert caught.value.message == violation.description


def test_all_refusals_come_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        spec_to_proto({"name": 1, "bogus": 2, "train": {"seed": "x"}})
    assert {v.field for v in caught.value.violations} == {"name", "bogus", "train.seed", "model", "dataset"}
    assert caught.value.message.endswith("(and 4 more)")


@pytest.mark.parametrize("content", [None, [], "text", 3])
def test_spec_must_be_a_mapping(content: object) -> None:
    with pytest.raises(InvalidRequest, match="must be a mapping"):
        spec_to_proto(content)


def test_overrides() -> None:
    given_spec = {**MINIMAL, "train": {"seed": 1}}
    overrides = [
        "train.learning_rate=1e-5",
        "train.betas=[0.9, 0.95]",
        "train.max_grad_norm=null",
        "name=x=y",
        "checkpoint.keep_last=3",
    ]
    result = with_overrides(given_spec, overrides)
    assert result == {
        **MINIMAL,
        "name": "x=y",
        "train": {"seed": 1, "learning_rate": "1e-5", "betas": [0.9, 0.95], "max_grad_norm": None},
        "checkpoint": {"keep_last": 3},
    }
    assert spec_to_proto({**result, "name": "n"}).train.learning_rate == 1e-5
    assert given_spec == {**MINIMAL, "train": {"seed": 1}}  # the caller's mapping is left alone


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.seed", "write it as field=value"),
        ("=3", "write it as field=value"),
        ("train..seed=3", "write it as field=value"),
        ("name.first=3", "name is not a section"),
        ("train.seed=[1", "the value is not YAML; put it in quotes"),
        (
            r'train.trainable=["layers\.[4-5]"]',
            r"in YAML a backslash, as in \\\., needs single quotes: \['layers\\\.\[4-5\]'\]",
        ),
    ],
)
def test_bad_overrides(override: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        with_overrides(MINIMAL, [override])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("job.yaml", "name: a\nname: b\n", "line 2: not YAML: the key 'name' is given twice"),
        ("job.yaml", "name: [a\nmodel: b\n", "not YAML"),
        ("job.yaml", "- a\n", "must contain a mapping"),
        ("job.yaml", "!!python/object:os.system {}", "not YAML"),
        ("job.json", '{"name": \n}', "line 2: not JSON"),
        ("job.yaml", "\x00", "not YAML"),
        ("job.yaml", "[" * 2_000, "nested too deeply"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BadFile) as caught:
        load_spec_file(path)
    assert words in caught.value.message
    assert str(path) in caught.value.message


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="No such file"):
        load_spec_file(tmp_path / "job.yaml")
