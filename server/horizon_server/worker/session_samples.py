"""Answers of a session: from the very planes that its steps write, so that no weight is copied for them."""

from __future__ import annotations

from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.engine.generation.generator import TokenGenerator
from horizon_server.engine.generation.sequences import GenerationOptions
from horizon_server.engine.template import Template
from horizon_server.records.session import Sample, Sampled, SampledAnswer
from horizon_server.worker.sampling import encoded, stop_tokens
from horizon_server.worker.set_up import SetUp
from horizon_server.worker_link.request import WorkerRequest


class SessionSampler:
    """Made at the first call that samples. Thread: the worker's main thread, between steps."""

    def __init__(self, request: WorkerRequest, set_up: SetUp) -> None:
        folder = set_up.folder
        # A model of its own: with a cache, the layers run with their own attention instead of the engine's.
        self._template = Template.from_folder(
            folder.path, layout=folder.layout, recipe=request.spec.train.recipe, own_attention=False
        )
        self._codec = TextCodec.from_folder(folder.path)
        self._stops = stop_tokens(folder.path, self._codec)
        self._set_up = set_up
        self._generator: TokenGenerator | None = None

    def answer(self, call: Sample) -> Sampled:
        """Answer the prompts of a call.

        Raises:
            InvalidData: a prompt cannot be rendered, or is too long; it names the prompt.
            InvalidModel: the architecture's cache cannot be used.
        """
        options = call.options
        prompts = [encoded(self._codec, index, prompt) for index, prompt in enumerate(call.prompts)]
        if self._generator is None:
            self._generator = TokenGenerator(self._template, self._set_up.store, self._set_up.device)
        how = GenerationOptions(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            stop_tokens=self._stops,
        )
        try:
            answers = self._generator.generate(prompts, how)
        finally:
            # Steps change the weights, which the next batch copies again.
            self._generator.release_device()
        return Sampled(
            answers=tuple(
                (SampledAnswer(tokens=answer.tokens, logprobs=(), ended=answer.ended, text=self._text(answer.tokens)),)
                for answer in answers
            ),
            prompt_tokens=tuple(map(tuple, prompts)),
        )

    def _text(self, tokens: tuple[int, ...]) -> str:
        text: str = self._codec.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def release_device(self) -> None:
        """Free what the generator has on the device, until its next token."""
        if self._generator is not None:
            self._generator.release_device()
