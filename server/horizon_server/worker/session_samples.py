"""Answers of a session: from the very planes that its steps write, so that no weight is copied for them."""

from __future__ import annotations

from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.engine.generation.generator import TokenGenerator, generation_template
from horizon_server.engine.template import Template
from horizon_server.events import SampledPrompt, SampledText
from horizon_server.records.session import Sample, Sampled, SampledAnswer
from horizon_server.worker.answering import Answering, Piece, encoded, generation_options, stop_tokens
from horizon_server.worker.set_up import SetUp
from horizon_server.worker_link.request import WorkerRequest


class SessionSampler:
    """Made at the first call that samples. Thread: the worker's main thread, between steps."""

    def __init__(self, request: WorkerRequest, set_up: SetUp) -> None:
        """Raises InvalidModel: the model cannot be computed token by token, or has no tokenizer."""
        folder = set_up.folder
        template = generation_template(
            lambda own: Template.from_folder(
                folder.path, layout=folder.layout, recipe=request.spec.train.recipe, own_attention=own
            )
        )
        self._codec = TextCodec.from_folder(folder.path)
        self._stops = stop_tokens(folder.path, self._codec)
        self._generator = TokenGenerator(
            template,
            set_up.store,
            set_up.device,
            chunk_tokens=request.plan.execution.chunk_tokens,
            expert_page_elements=request.plan.execution.expert_page_elements,
        )

    def answer(self, call: Sample) -> Sampled:
        """Answer the prompts of a call.

        Raises:
            InvalidData: a prompt cannot be rendered, or is too long; it names the prompt.
        """
        options = call.options
        prompts = [encoded(self._codec, index, prompt) for index, prompt in enumerate(call.prompts)]
        pieces: list[Piece] = []
        Answering(
            self._generator,
            prompts,
            generation_options(options, self._stops),
            self._codec,
            stop=options.stop,
            send=pieces.append,
        ).answer()
        answers = [
            [_answer_of(pieces, index, sample) for sample in range(options.num_samples)]
            for index in range(len(prompts))
        ]
        scores = {piece.prompt: piece.logprobs for piece in pieces if isinstance(piece, SampledPrompt)}
        return Sampled(
            answers=tuple(map(tuple, answers)),
            prompt_tokens=tuple(map(tuple, prompts)),
            prompt_logprobs=tuple((None, *scores[index]) for index in range(len(prompts))) if scores else (),
        )

    def release_device(self) -> None:
        """Free what the generator has on the device, until its next token; then it copies the weights again, which may
        have changed."""
        self._generator.release_device()


def _answer_of(pieces: list[Piece], prompt: int, sample: int) -> SampledAnswer:
    own = [p for p in pieces if isinstance(p, SampledText) and (p.prompt, p.sample) == (prompt, sample)]
    return SampledAnswer(
        tokens=tuple(token for piece in own for token in piece.tokens),
        logprobs=tuple(value for piece in own for value in piece.logprobs),
        ended="stop" if own and own[-1].ended == "stop" else "length",
        text="".join(piece.text for piece in own),
    )
