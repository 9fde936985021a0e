"""Calls for the child that answers prompts, in this process: orders by script instead of the daemon's pipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from horizon_server.children.calls import Ask, Begun, CallLine, Order
from horizon_server.children.entry import Answer, Failure
from horizon_server.codec import from_json, to_json, to_plain
from horizon_server.events import SampledPrompt, SampledText
from horizon_server.records.sample import SampleCall, SampleFigures, SampleModel, SampleOptions, SamplePrompt
from horizon_server.worker.sampling import Answerer


class ScriptedPipe:
    """In the place of `CallPipe`. The orders of a turn come between two tokens: those of the first turn before the
    first token. When the child has nothing to do, the next ones come; at the end of all, no more do."""

    def __init__(self, turns: Sequence[Sequence[Order]]) -> None:
        self._turns = list(turns)
        self.lines: defaultdict[int, list[CallLine]] = defaultdict(list)
        self.ended: list[int] = []
        """Calls in the order of their ends."""
        self.begun: list[int] = []

    def orders(self, *, wait: bool) -> list[Order] | None:
        """The next turn."""
        if not self._turns:
            return None if wait else []
        return list(self._turns.pop(0))

    def send(self, call: int, line: CallLine) -> None:
        """Note a line."""
        self.lines[call].append(line)
        if isinstance(line, Begun):
            self.begun.append(call)
        if isinstance(line, Answer | Failure):
            self.ended.append(call)

    def text(self, call: int, prompt: int = 0) -> str:
        """An answer."""
        texts = [line for line in self.lines[call] if isinstance(line, SampledText)]
        return "".join(line.text for line in texts if line.prompt == prompt)

    def tokens(self, call: int, prompt: int = 0, sample: int = 0) -> list[int]:
        """The tokens of an answer."""
        texts = [line for line in self.lines[call] if isinstance(line, SampledText)]
        return [token for line in texts if (line.prompt, line.sample) == (prompt, sample) for token in line.tokens]

    def logprobs(self, call: int, prompt: int = 0, sample: int = 0) -> list[float]:
        """Those of the tokens of an answer, after those of the prompt where they were asked for."""
        pieces = [line for line in self.lines[call] if isinstance(line, SampledText | SampledPrompt)]
        own = [one for one in pieces if (one.prompt, getattr(one, "sample", sample)) == (prompt, sample)]
        return [value for line in own for value in line.logprobs]

    def figures(self, call: int) -> SampleFigures:
        """What a call took. Raises what it failed with."""
        end = self.lines[call][-1]
        if isinstance(end, Failure):
            raise end.error
        assert isinstance(end, Answer), end
        return SampleFigures(**end.value)


def ask(call: int, *prompts: SamplePrompt, user: str = "ada", **options: Any) -> Ask:
    """An order for answers of 8 tokens, where it is not said otherwise."""
    asked = SampleCall(prompts=prompts, options=SampleOptions(**{"max_tokens": 8, **options}))
    return Ask(call=call, user=user, request=to_plain(asked))


def answered(model: SampleModel, *turns: Sequence[Order]) -> ScriptedPipe:
    """What a new child answers with a model."""
    pipe = ScriptedPipe(turns)
    Answerer(from_json(SampleModel, to_json(model)), pipe).run()  # type: ignore[arg-type]
    return pipe
