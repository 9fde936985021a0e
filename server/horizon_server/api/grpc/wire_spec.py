"""The job spec on the wire, both directions. A field that is absent on the wire takes the spec's default; nothing is judged here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from horizon_proto.v1 import job_pb2
from horizon_server.spec import CheckpointSpec, JobSpec, TrainSpec, parse_job_spec

_TRAIN_NUMBERS = (
    "epochs", "max_steps", "sequence_length", "tokens_per_step", "learning_rate", "warmup_steps", "weight_decay", "eps", "seed",
    "max_skipped_steps",
)  # fmt: skip
_CHECKPOINT_FIELDS = ("every_steps", "keep_last", "keep_best")
_JOB_TEXTS = ("name", "project", "model", "dataset", "eval_dataset")
_JOB_NUMBERS = ("eval_every_steps", "eval_fraction", "priority")
_JOB_ENUMS: Mapping[str, Any] = MappingProxyType({"method": job_pb2.Method, "device": job_pb2.DeviceChoice})
_TRAIN_ENUMS: Mapping[str, Any] = MappingProxyType(
    {"packing": job_pb2.Packing, "lr_schedule": job_pb2.LrSchedule, "train_on": job_pb2.TrainOn, "decay": job_pb2.Decay}
)
_CHECKPOINT_ENUMS: Mapping[str, Any] = MappingProxyType({"dtype": job_pb2.CheckpointDtype})
_PREFIXES: Mapping[str, str] = MappingProxyType({"device": "DEVICE_CHOICE_", "dtype": "CHECKPOINT_DTYPE_"})


def from_wire(wire: job_pb2.JobSpec) -> JobSpec:
    """Return the spec that a request asks for.

    Raises:
        InvalidSpec: with one violation per offending field.
    """
    plain: dict[str, Any] = {name: getattr(wire, name) for name in _JOB_TEXTS if getattr(wire, name)}
    plain |= _present(wire, _JOB_NUMBERS) | from_enums(wire, _JOB_ENUMS)
    plain["train"] = _train_from_wire(wire.train)
    plain["checkpoint"] = _present(wire.checkpoint, _CHECKPOINT_FIELDS) | from_enums(wire.checkpoint, _CHECKPOINT_ENUMS)
    return parse_job_spec(plain)


def to_wire(spec: JobSpec) -> job_pb2.JobSpec:
    """Return the spec with every field set."""
    wire = job_pb2.JobSpec(
        name=spec.name,
        project=spec.project,
        model=spec.model,
        dataset=spec.dataset,
        eval_dataset=spec.eval_dataset or "",
        train=_train_to_wire(spec.train),
        **{name: getattr(spec, name) for name in _JOB_NUMBERS},
        checkpoint=_checkpoint_to_wire(spec.checkpoint),
    )
    to_enums(spec, wire, _JOB_ENUMS)
    return wire


def _train_from_wire(wire: job_pb2.TrainSpec) -> dict[str, Any]:
    plain = _present(wire, _TRAIN_NUMBERS) | from_enums(wire, _TRAIN_ENUMS)
    if wire.betas:
        plain["betas"] = list(wire.betas)
    if wire.HasField("max_grad_norm"):
        plain["max_grad_norm"] = wire.max_grad_norm
    elif wire.no_clipping:
        plain["max_grad_norm"] = None
    return plain


def _train_to_wire(train: TrainSpec) -> job_pb2.TrainSpec:
    numbers = {name: getattr(train, name) for name in _TRAIN_NUMBERS}
    wire = job_pb2.TrainSpec(**numbers, betas=train.betas)
    if train.max_grad_norm is None:
        wire.no_clipping = True
    else:
        wire.max_grad_norm = train.max_grad_norm
    to_enums(train, wire, _TRAIN_ENUMS)
    return wire


def _checkpoint_to_wire(checkpoint: CheckpointSpec) -> job_pb2.CheckpointSpec:
    wire = job_pb2.CheckpointSpec(**{name: getattr(checkpoint, name) for name in _CHECKPOINT_FIELDS})
    to_enums(checkpoint, wire, _CHECKPOINT_ENUMS)
    return wire


def _present(wire: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(wire, name) for name in names if wire.HasField(name)}


def from_enums(wire: Any, enums: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of those that are set; a number that a newer client sent is left to the parser to refuse."""
    plain: dict[str, str] = {}
    for name, enum in enums.items():
        number = getattr(wire, name)
        if number in enum.values():
            text = enum.Name(number).removeprefix(_prefix(name))
            plain[name] = text.lower().replace("_", "-")
        else:
            plain[name] = str(number)
    return {name: value for name, value in plain.items() if value != "unspecified"}


def to_enums(spec: Any, wire: Any, enums: Mapping[str, Any]) -> None:
    """Set the fields of `wire` that are enumerations from the attributes of `spec` that have the same names."""
    for name, enum in enums.items():
        setattr(wire, name, enum.Value(_prefix(name) + getattr(spec, name).upper().replace("-", "_")))


def _prefix(name: str) -> str:
    return _PREFIXES.get(name, name.upper() + "_")
