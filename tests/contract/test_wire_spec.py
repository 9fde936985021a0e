"""The job spec survives the wire, and what is absent there takes the spec's defaults."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horizon_proto.v1 import job_pb2
from horizon_server.api.grpc.convert import set_fields, to_message
from horizon_server.errors import InvalidSpec
from horizon_server.recipe import LrSchedule
from horizon_server.spec import (
    CheckpointSpec,
    DpoSpec,
    EvalSpec,
    IpoSpec,
    JobSpec,
    KtoSpec,
    LimitsSpec,
    LoraSpec,
    LrGroup,
    MemorySpec,
    OrpoSpec,
    PolicySpec,
    SimpoSpec,
    Span,
    TrainSpec,
    parse_job_spec,
)


def from_wire(message: job_pb2.JobSpec) -> JobSpec:
    return parse_job_spec(set_fields(message))


def to_wire(spec: JobSpec) -> job_pb2.JobSpec:
    return to_message(spec, job_pb2.JobSpec)


# What UTF-8 can write.
WRITABLE = st.characters(codec="utf-8")
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
steps = st.integers(0, 100_000_000)


def floats(low: float, high: float, *, exclude_min: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, high, exclude_min=exclude_min, allow_nan=False)


lr_groups = st.lists(
    st.builds(LrGroup, match=st.sampled_from(["norm", r"layers\.1[0-9]\."]), scale=floats(0, 1000, exclude_min=True)),
    max_size=3,
).map(tuple)


lora_specs = st.builds(
    LoraSpec,
    rank=st.integers(1, 4096),
    alpha=floats(0, 1e6, exclude_min=True),
    dropout=floats(0, 0.999),
    targets=st.sampled_from([("all-linear",), ("q_proj", "!mlp")]),
    rslora=st.booleans(),
    dora=st.booleans(),
    base=st.sampled_from(["source", "int8", "nf4"]),
)
with_lora = st.fixed_dictionaries({"trainable": st.just(("lora",)), "lora": lora_specs})


betas, swapped, weights = floats(0, 1000, exclude_min=True), floats(0, 0.499), floats(0, 1000)
METHOD_SPECS: dict[str, st.SearchStrategy[Any]] = {
    "sft": st.none(),
    "pretrain": st.none(),
    "dpo": st.builds(DpoSpec, beta=betas, label_smoothing=swapped, length_normalised=st.booleans())
    | st.builds(DpoSpec, loss=st.just("hinge")),
    "ipo": st.builds(IpoSpec, beta=betas, length_normalised=st.booleans()),
    "orpo": st.builds(OrpoSpec, penalty=weights),
    "simpo": st.builds(SimpoSpec, beta=betas, gamma=weights, label_smoothing=swapped),
    "kto": st.builds(KtoSpec, beta=betas, desirable_weight=weights, undesirable_weight=weights),
    "policy": st.builds(
        PolicySpec,
        clip_low=floats(0, 1),
        clip_high=weights,
        kl_coefficient=weights,
        mean=st.sampled_from(["tokens", "documents"]),
    )
    | st.builds(PolicySpec, clip=st.just(False)),
}


@st.composite
def with_method(draw: st.DrawFn, specs: st.SearchStrategy[JobSpec]) -> JobSpec:
    """A spec with a method, and with options of that method."""
    method = draw(st.sampled_from(sorted(METHOD_SPECS)))
    options, spec = draw(METHOD_SPECS[method]), draw(specs)
    if options is None:
        return spec.model_copy(update={"method": method})
    train = spec.train.model_copy(update={"label_smoothing": 0.0, "train_on": "assistant"})
    return spec.model_copy(update={"method": method, method: options, "train": train})


@st.composite
def train_specs(draw: st.DrawFn) -> TrainSpec:
    by_steps = draw(st.booleans())
    schedule = draw(st.sampled_from(get_args(LrSchedule)))
    return TrainSpec(
        epochs=None if by_steps else draw(floats(0, 10_000, exclude_min=True)),
        max_steps=draw(st.integers(1, 100_000_000)) if by_steps else None,
        sequence_length=draw(st.integers(8, 4_194_304)),
        tokens_per_step=draw(st.integers(8, 67_108_864)),
        packing=draw(st.sampled_from(["auto", "true", "false"])),
        learning_rate=draw(floats(0, 10)),
        lr_schedule=schedule,
        min_lr_ratio=draw(floats(0, 1)) if schedule in ("cosine_with_min_lr", "wsd") else 0.0,
        lr_decay_ratio=draw(floats(0, 1)) if schedule == "wsd" else 0.1,
        warmup_steps=draw(steps),
        weight_decay=draw(floats(0, 10)),
        decay=draw(st.sampled_from(["trainer", "matrices", "all"])),
        betas=draw(st.tuples(floats(0, 0.999), floats(0, 0.999))),
        eps=draw(floats(0, 1, exclude_min=True)),
        max_grad_norm=draw(st.none() | floats(0, 1e9, exclude_min=True)),
        seed=draw(st.integers(0, 2**63 - 1)),
        train_on=draw(st.sampled_from(["assistant", "last-assistant", "all"])),
        max_skipped_steps=draw(st.integers(1, 100_000_000)),
        compute_dtype=draw(st.sampled_from(["auto", "float32", "bfloat16"])),
        compile=draw(st.sampled_from(["auto", "on", "off"])),
        lr_groups=draw(lr_groups),
        neftune_noise_alpha=draw(floats(0, 1000)),
        label_smoothing=draw(floats(0, 0.999)),
        matmul=draw(st.sampled_from(["bf16", "fp8", "fp8_full"])),
        deterministic=draw(st.booleans()),
        chunk_tokens=draw(st.none() | st.integers(64, 4_194_304)),
        optimizer_states=draw(st.sampled_from(["exact", "compressed"])),
        lanes=draw(st.sampled_from([None, 1, 2, 4, 8, 16, 32, 64])),
        parallel=draw(st.sampled_from(["auto", "rows", "layers"])),
        **draw(
            st.fixed_dictionaries({"trainable": st.sampled_from([("all",), ("norm", r"layers\.[0-3]\.")])}) | with_lora
        ),
    )


checkpoint_specs = st.builds(
    CheckpointSpec,
    every_steps=steps,
    every_minutes=floats(0, 525_600),
    keep_last=st.integers(1, 1000),
    keep_days=st.none() | floats(0, 36_500, exclude_min=True),
    keep_optimizer=st.sampled_from(["last", "all"]),
    keep_best=st.booleans(),
    dtype=st.sampled_from(["source", "bf16", "fp16", "fp32"]),
)
any_job_specs = st.builds(
    JobSpec,
    name=names,
    model=names | st.just("/models/a folder"),
    init_from=st.none() | st.sampled_from(["job_1a2b@last", "first-run@best", "x@120"]),
    dataset=names,
    project=st.just("") | names,
    eval_dataset=st.none() | names,
    train=train_specs(),
    eval_every_steps=steps,
    checkpoint=checkpoint_specs,
    priority=st.integers(-100, 100),
    device=st.sampled_from(["auto", "cuda", "host"]),
    gpus=st.integers(1, 64) | st.sampled_from(["1-2", "2-64"]),
    nodes=st.integers(1, 64) | st.sampled_from(["1-2", "2-64"]),
    eval_fraction=st.just(0.0),
    eval=st.builds(EvalSpec, patience=st.just(0), min_delta=floats(0, 1e9)),
    metadata=st.dictionaries(st.text(WRITABLE, min_size=1, max_size=64), st.text(WRITABLE, max_size=512), max_size=3),
    limits=st.builds(
        LimitsSpec,
        max_hours=st.none() | floats(0, 87_600, exclude_min=True),
        max_steps=st.none() | st.integers(1, 100_000_000),
    ),
)
# A dataset of its own and a fraction of the training data exclude each other.
job_specs = any_job_specs | st.builds(
    lambda spec, fraction: spec.model_copy(update={"eval_dataset": None, "eval_fraction": fraction}),
    any_job_specs,
    floats(0, 0.999),
)
# Most of what it excludes is of other sections.
job_specs |= st.builds(
    lambda spec: spec.model_copy(
        update={
            "memory": MemorySpec(experts="paged", tier="drive", accept_wear=True, keep_attention_outputs=False),
            "gpus": Span(),
            "nodes": Span(),
            "train": spec.train.model_copy(update={"lanes": None}),
        }
    ),
    any_job_specs,
)


@given(with_method(job_specs))
@settings(max_examples=200)
def test_a_spec_survives_the_wire(spec: JobSpec) -> None:
    wire = job_pb2.JobSpec.FromString(to_wire(spec).SerializeToString())
    assert from_wire(wire) == spec


def test_what_is_absent_takes_the_defaults() -> None:
    plain = {"name": "a", "model": "m", "dataset": "d"}
    assert from_wire(job_pb2.JobSpec(name="a", model="m", dataset="d")) == parse_job_spec(plain)


def test_zero_is_not_absent() -> None:
    spec = from_wire(
        job_pb2.JobSpec(
            name="a",
            model="m",
            dataset="d",
            train=job_pb2.TrainSpec(learning_rate=0.0, warmup_steps=0, seed=0),
            checkpoint=job_pb2.CheckpointSpec(every_steps=0, keep_best=False),
        )
    )
    assert (spec.train.learning_rate, spec.train.warmup_steps) == (0.0, 0)
    assert (spec.checkpoint.every_steps, spec.checkpoint.keep_best, spec.checkpoint.keep_last) == (0, False, 2)


@pytest.mark.parametrize(
    ("clipping", "expected"),
    [({}, 1.0), ({"max_grad_norm": 0.5}, 0.5), ({"no_clipping": True}, None), ({"no_clipping": False}, 1.0)],
)
def test_clipping_is_on_off_or_left_alone(clipping: dict[str, bool], expected: float | None) -> None:
    train = job_pb2.TrainSpec(**clipping)  # type: ignore[arg-type]
    assert from_wire(job_pb2.JobSpec(name="a", model="m", dataset="d", train=train)).train.max_grad_norm == expected


@pytest.mark.parametrize("field", ["gpus", "nodes"])
def test_a_range_is_two_numbers_of_which_the_first_is_what_older_daemons_read(field: str) -> None:
    plain, most_of = {"name": "a", "model": "m", "dataset": "d"}, f"max_{field}"
    wire = to_wire(parse_job_spec({**plain, field: "2-8"}))
    assert (getattr(wire, field), getattr(wire, most_of)) == (2, 8)
    fixed = to_wire(parse_job_spec({**plain, field: 2}))
    assert (getattr(fixed, field), fixed.HasField(most_of)) == (2, False)  # type: ignore[arg-type]
    upper_end = job_pb2.JobSpec(**plain, **{most_of: 4})  # type: ignore[arg-type]
    assert getattr(from_wire(upper_end), field).plain == "1-4"
    for least, most in ((4, 2), (0, 2), (1, 65), (-1, 3)):
        with pytest.raises(InvalidSpec) as caught:
            from_wire(job_pb2.JobSpec(**plain, **{field: least, most_of: most}))  # type: ignore[arg-type]
        assert [violation.field for violation in caught.value.violations] == [field]


def test_what_the_parser_refuses_is_named_by_field() -> None:
    wire = job_pb2.JobSpec(
        name="a b",
        dataset="d",
        method=77,  # type: ignore[arg-type]  # a newer client
        train=job_pb2.TrainSpec(epochs=1, max_steps=2, betas=[0.9], learning_rate=float("nan"), max_grad_norm=0.0),
        checkpoint=job_pb2.CheckpointSpec(keep_last=0),
    )
    with pytest.raises(InvalidSpec) as caught:
        from_wire(wire)
    assert {violation.field for violation in caught.value.violations} == {
        "name",
        "model",
        "method",
        "train.betas",
        "train.learning_rate",
        "train.max_grad_norm",
        "train.max_steps",
        "checkpoint.keep_last",
    }


def test_every_field_of_the_contract_is_carried() -> None:
    """A field that is added to the contract and forgotten here would be dropped in silence."""
    wire = to_wire(
        parse_job_spec(
            {
                "name": "a",
                "model": "m",
                "dataset": "d",
                "project": "p",
                "eval_dataset": "e",
                "init_from": "j@last",
                "report_to": ["mlflow"],
                "gpus": "2-8",
                "nodes": "2-4",
                "metadata": {"run": "7"},
            }
        )
    )
    unset = {field.name for field in job_pb2.JobSpec.DESCRIPTOR.fields} - {field.name for field, _ in wire.ListFields()}
    assert unset == set()
    optional = {
        "sets",
        "generate",
        "lr_groups",
        "epochs",
        "max_steps",
        "max_hours",
        "max_grad_norm",
        "no_clipping",
        "keep_days",
        "chunk_tokens",
        "lanes",
    }
    sections = (
        (wire.train, TrainSpec),
        (wire.train.lora, LoraSpec),
        (wire.checkpoint, CheckpointSpec),
        (wire.eval, EvalSpec),
        (wire.limits, LimitsSpec),
        (wire.memory, MemorySpec),
        (wire.dpo, DpoSpec),
        (wire.ipo, IpoSpec),
        (wire.orpo, OrpoSpec),
        (wire.simpo, SimpoSpec),
        (wire.kto, KtoSpec),
        (wire.policy, PolicySpec),
    )
    for section, spec in sections:
        fields = {field.name for field in section.DESCRIPTOR.fields}
        assert fields - {"no_clipping"} == set(spec.model_fields)
        assert fields - {field.name for field, _ in section.ListFields()} <= optional
