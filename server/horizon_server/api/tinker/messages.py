"""Documents and results as Tinker's SDK writes and reads them: protobuf with numbers as bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from horizon_proto.tinker.v1 import tinker_pb2 as pb
from horizon_server.errors import FieldViolation, InvalidData, InvalidSpec
from horizon_server.records.session import Computed, Datum, Forward, ForwardBackward
from horizon_server.services.session_checks import LOSSES
from horizon_server.services.tinker.drawing import Drawn, Top

_MASKED = -99999.0
"""The SDK's log-probability of a likeliest token that is not there."""
_INTEGERS: Mapping[int, np.dtype[Any]] = {pb.DATA_TYPE_INT64: np.dtype("<i8"), pb.DATA_TYPE_INT32: np.dtype("<i4")}
_FLOATS: Mapping[int, np.dtype[Any]] = {pb.DATA_TYPE_FLOAT32: np.dtype("<f4")}
_FIELDS = {"target_tokens": "targets", "weights": "weights", "logprobs": "logprobs", "advantages": "advantages"}
_STOPS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def read_forward_backward(content: bytes) -> tuple[str, int, Forward | ForwardBackward]:
    """Return the model, the number and the call of a request.

    Raises:
        InvalidSpec, InvalidData: they name the field.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise InvalidSpec("the body is not a ForwardBackwardRequest in protobuf") from error
    _require_known(message, "the request")
    if message.loss_fn not in LOSSES:
        raise InvalidSpec.of("loss_fn", f"loss_fn is {message.loss_fn!r:.80}; the losses here are {', '.join(LOSSES)}")
    options = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise InvalidSpec.of("loss_fn_config", f"loss_fn_config.{name:.80} is no number; no loss here takes a text")
        options[name] = value.number
    data = tuple(_datum(one, f"data[{index}]") for index, one in enumerate(message.data))
    kind = Forward if message.forward_only else ForwardBackward
    return message.model_id, message.seq_id, kind(data=data, loss=message.loss_fn, options=options)  # type: ignore[arg-type]  # one of LOSSES


def _datum(message: pb.Datum, name: str) -> Datum:
    _require_known(message, name)
    tokens: list[int] = []
    for chunk in message.model_input:
        _require_known(chunk, f"{name}.model_input")
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise _refused(f"{name}.model_input", "has a chunk that is not of tokens; images and sounds are not taken")
        tokens += _numbers(chunk.encoded_text.tokens, np.dtype("<i4"), f"{name}.model_input")
    found: dict[str, Any] = {"targets": ()}
    for field, tensor in message.loss_fn_inputs.items():
        if field not in _FIELDS:
            raise _refused(
                f"{name}.loss_fn_inputs.{field:.80}", f"is no input of a loss here; {', '.join(_FIELDS)} are"
            )
        found[_FIELDS[field]] = _tensor(tensor, f"{name}.loss_fn_inputs.{field}", is_tokens=field == "target_tokens")
    return Datum(tokens=tuple(tokens), **found)


def _tensor(tensor: pb.Tensor, name: str, *, is_tokens: bool) -> tuple[Any, ...]:
    if tensor.WhichOneof("encoding") != "dense":
        raise _refused(name, "must be dense")
    kind = (_INTEGERS if is_tokens else _FLOATS).get(tensor.dtype)
    if kind is None:
        wanted = "int64 or int32" if is_tokens else "float32"
        given = pb.DataType.Name(tensor.dtype) if tensor.dtype in pb.DataType.values() else str(tensor.dtype)
        raise _refused(name, f"has the dtype {given.removeprefix('DATA_TYPE_').lower()}; it must be {wanted}")
    numbers = _numbers(tensor.dense, kind, name)
    if tensor.shape and list(tensor.shape) != [len(numbers)]:
        shape = list(tensor.shape)[:8]
        raise _refused(name, f"has the shape {shape} and {len(numbers)} numbers; it must have one for each token")
    return tuple(numbers)


def _numbers(content: bytes, kind: np.dtype[Any], name: str) -> list[Any]:
    if len(content) % kind.itemsize:
        raise _refused(name, f"has {len(content)} bytes, which are no numbers of {kind.itemsize} bytes")
    numbers: list[Any] = np.frombuffer(content, dtype=kind).tolist()
    return numbers


def _require_known(message: Any, name: str) -> None:
    if len(UnknownFieldSet(message)):
        number = UnknownFieldSet(message)[0].field_number
        raise _refused(name, f"has the unknown field {number}; this SDK knows more than the daemon")


def _refused(name: str, problem: str) -> InvalidData:
    return InvalidData.of(name, f"{name} {problem}")


def with_names_of_tinker(error: InvalidData) -> InvalidData:
    """Return the error of a call with its fields under the names that they have in a request."""

    def named(text: str) -> str:
        text = re.sub(r"^options\.", "loss_fn_config.", text)
        text = re.sub(r"^(data\[\d+\])\.tokens", r"\1.model_input", text)
        return re.sub(r"^(data\[\d+\])\.(targets|weights|logprobs|advantages)", _input_name, text)

    violations = [
        FieldViolation(field=named(one.field), description=named(one.description)) for one in error.violations
    ]
    return InvalidData(named(error.message), violations=violations)


def _input_name(found: re.Match[str]) -> str:
    return f"{found[1]}.loss_fn_inputs.{'target_tokens' if found[2] == 'targets' else found[2]}"


def forward_backward_output(computed: Computed) -> bytes:
    """Return what a pass found."""
    lengths = [len(one) for one in computed.logprobs]
    numbers = np.concatenate([np.asarray(one, dtype="<f4") for one in computed.logprobs] or [np.zeros(0, "<f4")])
    logprobs = pb.BatchedTensor(
        data=numbers.tobytes(),
        offsets=(np.concatenate([[0], np.cumsum(lengths)]) * 4).astype("<i8").tobytes(),
        dtype=pb.DATA_TYPE_FLOAT32,
    )
    record = pb.ArrayRecord(num_datums=len(lengths))
    record.fields["logprobs"].CopyFrom(logprobs)
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record])
    output.metrics["loss:sum"] = computed.loss
    for name, value in computed.figures.items():
        output.metrics[f"{name}:mean"] = value
    return output.SerializeToString()


def sample_response(drawn: Drawn) -> bytes:
    """Return all answers to a prompt."""
    response = pb.SampleResponse()
    for answer in drawn.answers:
        response.sequences.append(
            pb.SampledSequence(
                stop_reason=_STOPS[answer.ended or "length"],
                tokens=np.asarray(answer.tokens, dtype="<i4").tobytes(),
                logprobs=np.asarray(answer.logprobs, dtype="<f4").tobytes(),
                topk_sampled_logprobs=_top(answer.top),
            )
        )
    if drawn.prompt_logprobs:
        numbers = [math.nan if value is None else value for value in drawn.prompt_logprobs]
        response.prompt_logprobs = np.asarray(numbers, dtype="<f4").tobytes()
    if (top := _top(drawn.prompt_top)) is not None:
        response.topk_prompt_logprobs.CopyFrom(top)
    return response.SerializeToString()


def _top(places: Sequence[Top]) -> pb.TopkLogprobs | None:
    most = max((len(place) for place in places), default=0)
    if not most:
        return None
    tokens = np.zeros((len(places), most), dtype="<i4")
    logprobs = np.full((len(places), most), _MASKED, dtype="<f4")
    for index, place in enumerate(places):
        for rank, (token, logprob) in enumerate(place):
            tokens[index, rank], logprobs[index, rank] = token, logprob
    return pb.TopkLogprobs(token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=most, length=len(places))
