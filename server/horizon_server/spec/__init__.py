"""The job spec: what a user may ask for. Type, range, default and description of each field are written here and
nowhere else.

`parse_job_spec` turns plain data (YAML, JSON, or a request converted by `api.grpc`) into a frozen `JobSpec` and refuses
unknown keys, wrong types and values out of range, all of them at once. `job_schema` is the same knowledge as JSON
Schema; the client ships it as data.
"""

from horizon_server.spec.evaluation import EVAL_SET, EvalSpec, GenerateSpec
from horizon_server.spec.fields import NAME_PATTERN, NAME_RULE
from horizon_server.spec.job import (
    CheckpointSpec,
    JobSpec,
    LimitsSpec,
    check_kinds,
    job_schema,
    parse_job_spec,
)
from horizon_server.spec.lora import ALL_LINEAR, BaseFormat, LoraSpec
from horizon_server.spec.memory import MemorySpec, MemoryTier
from horizon_server.spec.objective import (
    METHODS,
    DpoSpec,
    IpoSpec,
    KtoSpec,
    Method,
    OrpoSpec,
    PolicySpec,
    SessionSpec,
    SimpoSpec,
    check_kind,
)
from horizon_server.spec.span import Span
from horizon_server.spec.training import (
    EVERYTHING,
    LORA,
    CompileChoice,
    ComputeDtypeChoice,
    LrGroup,
    OptimizerStates,
    TrainOn,
    TrainSpec,
)

__all__ = [
    "ALL_LINEAR",
    "EVAL_SET",
    "EVERYTHING",
    "LORA",
    "METHODS",
    "NAME_PATTERN",
    "NAME_RULE",
    "BaseFormat",
    "CheckpointSpec",
    "CompileChoice",
    "ComputeDtypeChoice",
    "DpoSpec",
    "EvalSpec",
    "GenerateSpec",
    "IpoSpec",
    "JobSpec",
    "KtoSpec",
    "LimitsSpec",
    "LoraSpec",
    "LrGroup",
    "MemorySpec",
    "MemoryTier",
    "Method",
    "OptimizerStates",
    "OrpoSpec",
    "PolicySpec",
    "SessionSpec",
    "SimpoSpec",
    "Span",
    "TrainOn",
    "TrainSpec",
    "check_kind",
    "check_kinds",
    "job_schema",
    "parse_job_spec",
]
