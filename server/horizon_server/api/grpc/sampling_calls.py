"""The calls of the sampler and their results as messages: what does not follow the names of the records' fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from horizon_proto.v1 import checkpoint_pb2
from horizon_server.api.grpc.convert import from_message
from horizon_server.api.services import Services
from horizon_server.events import SampledPrompt, SampledText
from horizon_server.records.account import Principal
from horizon_server.records.sample import SampleFigures, SampleOptions, SamplePrompt, require_few


def sample(services: Services, caller: Principal, request: checkpoint_pb2.SampleCheckpointRequest) -> Any:
    """Have a checkpoint answer prompts."""
    # Before they are converted: one by one that takes far longer than to count them.
    require_few(request.prompts)
    prompts = [from_message(prompt, SamplePrompt) for prompt in request.prompts]
    return services.samples.sample(caller, request.job_id, request.step, prompts, from_message(request, SampleOptions))


def sampled_fields(piece: SampledText | SampledPrompt | SampleFigures) -> Mapping[str, Any]:
    """Return the field of the answer for a piece of it."""
    if isinstance(piece, SampleFigures):
        return {"figures": piece}
    top = [
        SimpleNamespace(
            tokens=[
                SimpleNamespace(token=token, logprob=logprob, text=text)
                for (token, logprob), text in zip(likely, texts, strict=True)
            ]
        )
        for likely, texts in zip(piece.top, piece.top_texts, strict=True)
    ]
    of_both = {"prompt": piece.prompt, "tokens": piece.tokens, "texts": piece.texts, "logprobs": piece.logprobs}
    if isinstance(piece, SampledPrompt):
        return {"prompt": SimpleNamespace(**of_both, top=top)}
    rest = {"text": piece.text, "num_tokens": piece.num_tokens, "ended": piece.ended, "sample": piece.sample}
    return {"text": SimpleNamespace(**of_both, **rest, top=top)}
