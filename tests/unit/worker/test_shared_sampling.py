"""Calls that the child answers together: the same answers as alone, who joins when, and what ends one of them alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.scripted_calls import ScriptedPipe, answered, ask

from horizon_server.children.calls import Continue, Hold, Leave
from horizon_server.children.entry import Answer, Failure
from horizon_server.demo.recipe import write_demo_model
from horizon_server.engine.generation.generator import TokenGenerator
from horizon_server.errors import DoesNotFit, HorizonError, InvalidData, InvalidModel
from horizon_server.events import SampledText
from horizon_server.records.sample import SampleMessage, SampleModel, SamplePrompt
from horizon_server.worker import sampling

BOX = SamplePrompt(text="The lab box")
LONG = SamplePrompt(text="The lab box " * 12)
CHAT = SamplePrompt(messages=(SampleMessage(role="user", content="Who are you?"),))
DRAWN: dict[str, Any] = {"temperature": 1.1, "seed": 11, "num_samples": 3, "logprobs": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("sampling") / "model")


def model_of(folder: Path, **changes: Any) -> SampleModel:
    return SampleModel(**{"folder": folder, "num_threads": 1, "cache_bytes": 2**30, **changes})


def passes(pipe: ScriptedPipe, call: int) -> tuple[int, int]:
    """All of a call, and those that it shared."""
    figures = pipe.figures(call)
    return figures.num_passes, figures.num_shared_passes


def test_answers_together_and_joined_late_are_those_alone(folder: Path) -> None:
    asked: dict[int, tuple[tuple[SamplePrompt, ...], dict[str, Any]]] = {
        1: ((BOX,), {"max_tokens": 30, "logprobs": 0}),
        2: ((CHAT, LONG), DRAWN),
        3: ((BOX, LONG), {**DRAWN, "seed": 5, "top_k": 20}),
        4: ((LONG,), {"logprobs": 0, "prompt_logprobs": 0, "max_tokens": 5}),
    }
    orders = {call: ask(call, *prompts, **options) for call, (prompts, options) in asked.items()}
    alone = {call: answered(model_of(folder), [order]) for call, order in orders.items()}
    together = answered(model_of(folder), list(orders.values()))
    late = answered(model_of(folder), [orders[1]], [], [orders[2]], [], [], [orders[3], orders[4]])

    for pipe in (together, late):
        for call, (prompts, options) in asked.items():
            for prompt in range(len(prompts)):
                for sample in range(options.get("num_samples", 1)):
                    tokens = pipe.tokens(call, prompt, sample)
                    assert tokens == alone[call].tokens(call, prompt, sample) != []
                    wanted = pytest.approx(alone[call].logprobs(call, prompt, sample), abs=1e-5)
                    assert pipe.logprobs(call, prompt, sample) == wanted
    assert passes(together, 1) == (30, 12)
    assert passes(late, 1) == (30, 12 + 3)
    assert all(passes(pipe, call)[0] == passes(pipe, call)[1] for pipe in (together, late) for call in (2, 3, 4))
    assert passes(alone[1], 1) == (30, 0)


def test_a_caller_who_leaves_takes_the_own_answers_alone(folder: Path) -> None:
    alone = answered(model_of(folder), [ask(1, BOX, max_tokens=20)])
    pipe = answered(
        model_of(folder),
        [ask(1, BOX, max_tokens=20), ask(2, CHAT, max_tokens=900), ask(3, CHAT, LONG, max_tokens=900)],
        [],
        [Leave(call=2), Leave(call=77)],
        [],
        [Leave(call=3)],
    )

    assert pipe.ended == [1]
    assert pipe.tokens(1) == alone.tokens(1)
    assert passes(pipe, 1) == (20, 4)


def test_a_call_that_was_left_before_it_began_is_never_begun(folder: Path) -> None:
    pipe = answered(model_of(folder, num_sequences=1), [ask(1, BOX), ask(2, CHAT)], [], [Leave(call=2)])
    assert pipe.begun == pipe.ended == [1]
    assert not pipe.lines[2]


def test_what_is_wrong_with_a_call_ends_it_alone(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content.gone.too }}{% endfor %}")
    alone = answered(model_of(model), [ask(1, BOX)])
    pipe = answered(
        model_of(model, cache_bytes=2**24),
        [ask(1, BOX), ask(2, CHAT), ask(3, SamplePrompt(ids=(1 << 20,))), ask(4, SamplePrompt(chat_json="{"))],
        [ask(5, BOX, LONG, max_tokens=4000)],
        [ask(6, BOX)],
    )

    assert pipe.tokens(1) == pipe.tokens(6) == alone.tokens(1)
    wanted: dict[int, tuple[type[HorizonError], str]] = {
        2: (InvalidData, "template"),
        3: (InvalidData, "1048576"),
        4: (InvalidData, "is not JSON"),
        5: (DoesNotFit, "send fewer prompts"),
    }
    for call, (kind, words) in wanted.items():
        with pytest.raises(kind, match=words):
            pipe.figures(call)


def test_a_template_that_never_ends_fails_its_call_and_others_are_answered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = shutil.copytree(folder, tmp_path / "endless")
    (endless / "chat_template.jinja").write_text(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(sampling, "RENDER_S", 0.3)
    pipe = answered(model_of(endless), [ask(1, CHAT, CHAT), ask(2, BOX)])
    with pytest.raises(InvalidModel, match=r"takes more than 0\.3 s"):
        pipe.figures(1)
    assert passes(pipe, 2) == (8, 0)


def test_what_fails_in_a_pass_ends_the_child(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise InvalidModel("the layers are broken")

    monkeypatch.setattr(TokenGenerator, "step", broken)
    with pytest.raises(InvalidModel, match="the layers are broken"):
        answered(model_of(folder), [ask(1, BOX), ask(2, CHAT)])


def test_calls_wait_until_there_is_room_for_their_answers(folder: Path) -> None:
    pipe = answered(
        model_of(folder, num_sequences=3),
        [ask(1, BOX, BOX, max_tokens=5), ask(2, BOX, CHAT, max_tokens=6), ask(3, BOX, max_tokens=4)],
    )
    # The third has room beside the first, and does not pass the second, which waits for it.
    assert (pipe.begun, pipe.ended) == ([1, 2, 3], [1, 3, 2])
    assert [passes(pipe, call) for call in (1, 2, 3)] == [(5, 0), (6, 4), (4, 4)]


def test_calls_wait_until_there_is_room_for_their_keys_and_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    step = TokenGenerator.step

    def noted(self: TokenGenerator, **options: Any) -> Any:
        kept.append(self.kept_bytes())
        found = step(self, **options)
        held = sum(buffer.nbytes for layer in self._kept._buffers for buffer in layer)
        assert held <= kept[-1]
        return found

    monkeypatch.setattr(TokenGenerator, "step", noted)
    answered(model_of(folder), [ask(1, BOX)])
    # Two sequences of up to 64 tokens have room, or one of 128.
    one, kept[:] = kept[0], []
    pipe = answered(
        model_of(folder, cache_bytes=2 * one),
        [ask(call, BOX, max_tokens=6) for call in (1, 2, 3)],
        [ask(4, LONG, max_tokens=60), ask(5, BOX)],
    )
    assert max(kept) <= 2 * one
    assert pipe.begun == pipe.ended == [1, 2, 3, 4, 5]
    assert [passes(pipe, call) for call in (1, 2, 3)] == [(6, 6), (6, 6), (6, 0)]
    assert passes(pipe, 4)[1] == passes(pipe, 5)[1] == 0


def test_of_those_who_wait_the_user_with_the_fewest_answers_is_first(folder: Path) -> None:
    of_ada = [ask(call, BOX, max_tokens=4 + call) for call in range(1, 7)]
    pipe = answered(
        model_of(folder, num_sequences=3),
        [*of_ada, ask(7, BOX, user="bob"), ask(8, BOX, user="bob"), ask(9, BOX, user="carl")],
    )
    # Each has one before anyone has two.
    assert pipe.begun[:3] == [1, 7, 9]
    assert sorted(pipe.begun) == list(range(1, 10))


def test_a_caller_who_does_not_read_makes_no_one_wait_but_the_own_call(folder: Path) -> None:
    alone = answered(model_of(folder), [ask(1, CHAT, max_tokens=10)])
    pipe = answered(
        model_of(folder),
        [ask(1, CHAT, max_tokens=10), ask(2, BOX, max_tokens=12)],
        [Hold(call=1), Hold(call=77)],
        *[[] for _ in range(10)],
        # Now nothing is to be computed until this comes.
        [Continue(call=1)],
    )
    assert pipe.ended == [2, 1]
    assert pipe.tokens(1) == alone.tokens(1)
    assert (passes(pipe, 1), passes(pipe, 2)) == ((10, 1), (12, 1))


def test_a_long_prompt_is_computed_in_pieces_beside_the_tokens_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_PIECE_TOKENS", 8)
    orders = {call: ask(call, prompt, max_tokens=9) for call, prompt in ((1, BOX), (2, LONG))}
    alone = {call: answered(model_of(folder), [order]) for call, order in orders.items()}
    num_prompt_tokens = alone[2].figures(2).num_prompt_tokens
    assert num_prompt_tokens > 16
    pipe = answered(model_of(folder), [orders[1]], [orders[2]])
    for call in orders:
        assert pipe.tokens(call) == alone[call].tokens(call)
    # One for each token of the first one, whatever the second one has to compute.
    assert passes(pipe, 1) == (9, 8)
    assert pipe.ended == [1, 2]
    assert passes(pipe, 2)[0] == len(pipe.tokens(2)) + -(-num_prompt_tokens // 8) - 1
    # Alone it is computed at once.
    assert passes(alone[2], 2) == (len(alone[2].tokens(2)), 0)


def test_texts_that_end_an_answer_end_no_other(folder: Path) -> None:
    free = answered(model_of(folder), [ask(1, BOX, max_tokens=20)])
    stop = free.text(1)[4:8]
    pipe = answered(model_of(folder), [ask(1, BOX, max_tokens=20, stop=(stop,)), ask(2, BOX, max_tokens=20)])
    assert pipe.text(1) == free.text(1)[: free.text(1).index(stop)]
    assert pipe.text(2) == free.text(1)
    last = [line for line in pipe.lines[1] if isinstance(line, SampledText)][-1]
    assert last.ended == "stop"


def test_nothing_is_computed_twice_for_two_and_nothing_once_for_two_users(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What prompts have in common is computed once within a call, and again in another one."""
    new: list[int] = []
    run = TokenGenerator._pass

    def noted(self: TokenGenerator, sequences: Any) -> Any:
        new.append(sum(sequence.num_new for sequence in sequences))
        return run(self, sequences)

    begin = tuple(range(20, 52))
    prompts = [SamplePrompt(ids=(*begin, last)) for last in (60, 61)]
    monkeypatch.setattr(TokenGenerator, "_pass", noted)
    answered(model_of(folder), [ask(1, *prompts, max_tokens=1)])
    assert new == [32, 2]
    new.clear()
    answered(
        model_of(folder),
        [ask(1, prompts[0], user="ada", max_tokens=1), ask(2, prompts[1], user="bob", max_tokens=1)],
    )
    assert new == [66]


def test_every_call_ends_with_one_answer_or_one_failure(folder: Path) -> None:
    pipe = answered(model_of(folder), [ask(call, BOX, max_tokens=call) for call in range(1, 6)])
    assert pipe.ended == [1, 2, 3, 4, 5]
    for lines in pipe.lines.values():
        assert [isinstance(line, Answer | Failure) for line in lines] == [False] * (len(lines) - 1) + [True]
    assert json.dumps([lines[-1].value for lines in pipe.lines.values() if isinstance(lines[-1], Answer)])
