"""The job spec: what a user may ask for. Type, range, default and description of each field are written here and nowhere else.

`parse_job_spec` turns plain data (YAML, JSON, or a request converted by `api.grpc`) into a frozen `JobSpec` and refuses unknown keys, wrong
types and values out of range, all of them at once. `job_schema` is the same knowledge as JSON Schema; the client ships it as data.
"""

from horizon_server.spec.evaluation import EVAL_SET, EvalSpec, GenerateSpec
from horizon_server.spec.fields import NAME_PATTERN, NAME_RULE
from horizon_server.spec.job import CheckpointSpec, JobSpec, LimitsSpec, Method, job_schema, parse_job_spec
from horizon_server.spec.training import (
    EVERYTHING,
    NOT,
    CompileChoice,
    ComputeDtypeChoice,
    LrGroup,
    LrSchedule,
    TrainOn,
    TrainSpec,
)

__all__ = [
    "EVAL_SET",
    "EVERYTHING",
    "NAME_PATTERN",
    "NAME_RULE",
    "NOT",
    "CheckpointSpec",
    "CompileChoice",
    "ComputeDtypeChoice",
    "EvalSpec",
    "GenerateSpec",
    "JobSpec",
    "LimitsSpec",
    "LrGroup",
    "LrSchedule",
    "Method",
    "TrainOn",
    "TrainSpec",
    "job_schema",
    "parse_job_spec",
]
