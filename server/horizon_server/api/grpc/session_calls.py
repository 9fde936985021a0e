"""The calls of a session and their results as messages: what does not follow the names of the records' fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from horizon_proto.v1 import session_pb2
from horizon_server.api.grpc.convert import from_message
from horizon_server.errors import InvalidSpec
from horizon_server.records.sample import SampleOptions, SamplePrompt, require_few
from horizon_server.records.session import CALLS, Call, Computed, Result, Sample, Sampled, name_of


def session_call(request: session_pb2.CallSessionRequest) -> Call:
    """Return what is called. Raises InvalidSpec where nothing is, or a field cannot be held."""
    name = request.WhichOneof("call")
    if name is None:
        raise InvalidSpec.of("call", f"call is missing; it is one of {', '.join(CALLS)}")
    message = getattr(request, name)
    if name == "sample":
        require_few(message.prompts)
        prompts = tuple(from_message(prompt, SamplePrompt) for prompt in message.prompts)
        return Sample(prompts=prompts, options=from_message(message, SampleOptions))
    call: Call = from_message(message, CALLS[name])
    return call


def session_result_fields(found: tuple[Result | None, int]) -> Mapping[str, Any]:
    """Return the fields of the answer: a result, where the call is done, and the number of the newest call."""
    result, last_number = found
    if result is None:
        return {"last_number": last_number}
    filled: object = result
    if isinstance(result, Computed):
        numbers = [SimpleNamespace(values=values) for values in result.logprobs]
        filled = SimpleNamespace(loss=result.loss, logprobs=numbers, figures=result.figures)
    elif isinstance(result, Sampled):
        of_prompts = result.prompt_logprobs or ((),) * len(result.answers)
        prompts = [
            SimpleNamespace(
                answers=answers,
                prompt_tokens=tokens,
                prompt_logprobs=[0.0 if value is None else value for value in logprobs],
            )
            for answers, tokens, logprobs in zip(result.answers, result.prompt_tokens, of_prompts, strict=True)
        ]
        filled = SimpleNamespace(prompts=prompts)
    return {name_of(result): filled, "last_number": last_number}
