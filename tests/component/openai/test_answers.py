"""Completions and chats by OpenAI's SDK, of a base and of what jobs have made: the texts are those of our own client,
the log-probabilities those of transformers."""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

import pytest
import torch
from openai import APITimeoutError, BadRequestError, NotFoundError, OpenAI, PermissionDeniedError
from openai.types import Completion
from tests.component.openai.conftest import CHATS, Connect, lines
from tests.support.daemon_process import DaemonProcess, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = "demo-model"
CHAT: Any = [{"role": "user", "content": "What is a lab box?"}]


@pytest.fixture(scope="module")
def tuned(client: OpenAI) -> str:
    """The name of a fine-tuned model."""
    training = client.files.create(file=("tuned.jsonl", lines(CHATS)), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=training.id,
        hyperparameters={"n_epochs": 4, "batch_size": 4, "learning_rate_multiplier": 100.0},
        extra_body={"horizon": {"train": {"sequence_length": 128, "compile": "off"}, "checkpoint": {"every_steps": 4}}},
    )
    wait_for(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "succeeded", 240.0)
    return str(client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model)


@pytest.fixture(scope="module")
def with_tools(daemon: DaemonProcess, pushed: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a model whose chat template prints tools."""
    folder = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(pushed.model, folder)
    for path in folder.glob("chat_template*"):
        path.unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config["chat_template"] = (
        "{%- for tool in tools or [] -%}{{- tool | tojson -}}{%- endfor -%}"
        "{%- for message in messages -%}{{- message['role'] + ': ' + message['content'] + '\n' -}}"
        "{%- for call in message.tool_calls or [] -%}{{- call.function.arguments.city -}}{%- endfor -%}{%- endfor -%}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    with daemon.client(daemon.user("ada")) as ours:
        ours.models.push(folder, name="with-tools")
    return "with-tools"


@pytest.fixture(scope="module")
def loose(connect: Connect) -> OpenAI:
    """A client that reads answers as the SDK does by default: OpenAI itself leaves null where its types have none."""
    return connect(_strict_response_validation=False)


@pytest.fixture(scope="module")
def reference(pushed: Any) -> tuple[Any, Any]:
    """The base in transformers, and its tokenizer."""
    model: Any = AutoModelForCausalLM.from_pretrained(pushed.model, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(pushed.model)


def greedy(client: OpenAI, **asked: Any) -> Completion:
    completion = client.completions.create(**{"model": MODEL, "temperature": 0, "max_tokens": 8, **asked})
    assert isinstance(completion, Completion)
    return completion


def test_a_base_and_a_checkpoint_continue_a_text(
    client: OpenAI, tuned: str, reference: tuple[Any, Any], daemon: DaemonProcess
) -> None:
    model, tokenizer = reference
    ids = tokenizer("The lab box", return_tensors="pt")["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)

    answer = greedy(client, prompt="The lab box")

    assert answer.choices[0].text == tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (ids.shape[1], 8)
    assert answer.usage.total_tokens == ids.shape[1] + 8
    assert (answer.object, answer.model) == ("text_completion", MODEL)

    job = tuned.rpartition(":")[2]
    with daemon.client(daemon.user("ada")) as ours:
        *pieces, _ = ours.checkpoints.sample(job, ["The lab box"], max_tokens=8)
    expected = "".join(piece.text for piece in pieces)  # type: ignore[union-attr]
    step = client.fine_tuning.jobs.checkpoints.list(job).data[0]
    for name in (tuned, step.fine_tuned_model_checkpoint, f"{job}@last"):
        assert greedy(client, model=name, prompt="The lab box").choices[0].text == expected


def test_a_chat_is_answered_as_the_template_renders_it(client: OpenAI, tuned: str, daemon: DaemonProcess) -> None:
    with daemon.client(daemon.user("ada")) as ours:
        *pieces, _ = ours.checkpoints.sample(tuned.rpartition(":")[2], [CHAT], max_tokens=16)
    answer = client.chat.completions.create(model=tuned, messages=CHAT, temperature=0, max_completion_tokens=16)
    (choice,) = answer.choices
    assert choice.message.content == "".join(piece.text for piece in pieces)  # type: ignore[union-attr]
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 16
    parts: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    assert client.chat.completions.create(model=tuned, messages=parts, max_tokens=2).choices


def test_prompts_are_texts_or_tokens_one_or_many(client: OpenAI, reference: tuple[Any, Any]) -> None:
    _, tokenizer = reference
    texts = ["The lab box", "Why is", "One"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    one_by_one = [greedy(client, prompt=text).choices[0].text for text in texts]
    for prompts in (texts, ids):
        answer = greedy(client, prompt=prompts)
        assert [choice.text for choice in answer.choices] == one_by_one
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert greedy(client, prompt=ids[1]).choices[0].text == one_by_one[1]


def test_a_stream_adds_up_to_the_answer(client: OpenAI, loose: OpenAI, tuned: str) -> None:
    whole = client.chat.completions.create(model=tuned, messages=CHAT, temperature=0, max_tokens=40)
    stream = client.chat.completions.create(
        model=tuned, messages=CHAT, temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    said = "".join(part.choices[0].delta.content or "" for part in parts)
    assert said == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts][-1] == whole.choices[0].finish_reason
    assert (last.choices, last.usage) == ([], whole.usage)
    # The SDK's own helper puts the message together.
    with client.chat.completions.stream(model=tuned, messages=CHAT, temperature=0, max_tokens=40) as helped:
        assert helped.get_final_completion().choices[0].message.content == said

    text = greedy(client, model=tuned, prompt="The lab box", max_tokens=40).choices[0]
    pieces = list(
        loose.completions.create(model=tuned, prompt="The lab box", temperature=0, max_tokens=40, stream=True)
    )
    assert "".join(piece.choices[0].text for piece in pieces) == text.text
    assert pieces[-1].choices[0].finish_reason == text.finish_reason
    assert pieces[-1].usage is None


def test_an_answer_ends_before_a_text_that_stops_it(client: OpenAI) -> None:
    whole = greedy(client, prompt="The lab box", max_tokens=24).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    cut = whole[: whole.index(stop)]
    for given in (stop, [stop, "never said"]):
        choice = greedy(client, prompt="The lab box", max_tokens=24, stop=given).choices[0]
        assert (choice.text, choice.finish_reason) == (cut, "stop")
    streamed = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=24, stop=[stop], stream=True
    )
    assert stop not in "".join(chunk.choices[0].delta.content or "" for chunk in streamed)


def test_several_answers_are_drawn_by_a_seed(client: OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": ["The lab box", "One"], "n": 3, "temperature": 1.5, "top_p": 0.95, "seed": 11}
    first = greedy(client, **asked)
    assert [choice.index for choice in first.choices] == list(range(6))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) > 3
    assert [choice.text for choice in greedy(client, **asked).choices] == texts
    assert [choice.text for choice in greedy(client, **{**asked, "seed": 12}).choices] != texts
    # Without a seed each call draws anew.
    del asked["seed"]
    assert [c.text for c in greedy(client, **asked).choices] != [c.text for c in greedy(client, **asked).choices]
    only = greedy(client, prompt="The lab box", temperature=2, extra_body={"top_k": 1}).choices[0].text
    assert only == greedy(client, prompt="The lab box").choices[0].text
    chat = client.chat.completions.create(model=MODEL, messages=CHAT, n=2, seed=3, max_tokens=8)
    assert [choice.index for choice in chat.choices] == [0, 1]
    streamed = client.chat.completions.create(model=MODEL, messages=CHAT, n=2, seed=3, max_tokens=8, stream=True)
    said = ["", ""]
    for chunk in streamed:
        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert said == [choice.message.content for choice in chat.choices]


def test_echoed_tokens_have_the_log_probabilities_of_transformers(loose: OpenAI, reference: tuple[Any, Any]) -> None:
    model, tokenizer = reference
    texts = ["The lab box keeps weights in RAM.", "One two"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    for prompts in (texts, ids):
        answer = greedy(loose, prompt=prompts, echo=True, logprobs=2, max_tokens=1)
        for text, tokens, choice in zip(texts, ids, answer.choices, strict=True):
            assert choice.text.startswith(text)
            assert choice.logprobs is not None
            found = choice.logprobs
            assert found.token_logprobs is not None
            assert found.tokens is not None
            assert found.top_logprobs is not None
            assert found.text_offset is not None
            # The prompt and the one token that follows it.
            assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(tokens) + 1
            assert found.token_logprobs[0] is None
            assert found.top_logprobs[0] is None
            assert "".join(found.tokens[: len(tokens)]) == text
            for offset, token in list(zip(found.text_offset, found.tokens, strict=True))[:-1]:
                assert text[offset:].startswith(token)
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            expected = [float(logits[place, token]) for place, token in enumerate(tokens[1:])]
            assert found.token_logprobs[1 : len(tokens)] == pytest.approx(expected, abs=1e-4)
            for place, top in enumerate(found.top_logprobs[1:]):
                assert max(top.values()) == pytest.approx(float(logits[place].max()), abs=1e-4)
                assert len(top) <= 2


def test_a_prompt_is_scored_without_an_answer(loose: OpenAI) -> None:
    with_one = greedy(loose, prompt="The lab box", echo=True, logprobs=1, max_tokens=1).choices[0]
    (choice,) = greedy(loose, prompt="The lab box", echo=True, logprobs=1, max_tokens=0).choices
    assert (choice.text, choice.finish_reason) == ("The lab box", "length")
    assert choice.logprobs is not None
    assert with_one.logprobs is not None
    assert choice.logprobs.tokens == (with_one.logprobs.tokens or [])[:-1]
    echoed = greedy(loose, prompt="The lab box", echo=True, max_tokens=1, n=2)
    assert [one.text[:11] for one in echoed.choices] == ["The lab box"] * 2
    assert echoed.choices[0].logprobs is None
    pieces = list(loose.completions.create(model=MODEL, prompt="One", echo=True, max_tokens=2, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces).startswith("One")


def test_continuations_are_scored_as_lm_evaluation_harness_reads_them(
    loose: OpenAI, reference: tuple[Any, Any]
) -> None:
    """The request of its `local-completions`, and its `parse_logprobs`."""
    model, tokenizer = reference
    context = tokenizer("The lab box")["input_ids"]
    given = torch.tensor([context])
    output = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=6, do_sample=False)
    likeliest = output[0, len(context) :].tolist()
    continuations = [likeliest, [*likeliest[:-1], likeliest[-1] + 1], tokenizer(" One two")["input_ids"]]
    answer = greedy(loose, prompt=[context + c for c in continuations], echo=True, logprobs=1, max_tokens=1, seed=1234)
    for choice, continuation in zip(answer.choices, continuations, strict=True):
        assert choice.logprobs is not None
        numbers = (choice.logprobs.token_logprobs or [])[len(context) : -1]
        tops = (choice.logprobs.top_logprobs or [])[len(context) : -1]
        with torch.no_grad():
            logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(continuation)[:, None]).sum()
        assert sum(numbers) == pytest.approx(float(expected), abs=1e-3)
        # Compared as numbers: the same token has the same one in both places.
        is_greedy = all(number == max(top.values()) for number, top in zip(numbers, tops, strict=True))
        assert is_greedy == (continuation == likeliest)


def test_a_chat_shows_the_likeliest_tokens(client: OpenAI, tuned: str) -> None:
    asked: dict[str, Any] = {"model": tuned, "messages": CHAT, "temperature": 0, "logprobs": True, "max_tokens": 12}
    (choice,) = client.chat.completions.create(**asked, top_logprobs=3).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob, "the likeliest was taken"
        assert token.bytes == list(token.token.encode())
        assert math.exp(token.logprob) <= 1
    (plain,) = client.chat.completions.create(**asked).choices
    assert plain.logprobs is not None
    assert [token.logprob for token in plain.logprobs.content or ()] == [t.logprob for t in choice.logprobs.content]
    streamed = client.chat.completions.create(**asked, stream=True)
    seen = [token for chunk in streamed if (found := chunk.choices[0].logprobs) for token in found.content or ()]
    assert [token.token for token in seen] == [token.token for token in choice.logprobs.content]


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"colour": "red"}, "colour", "Unknown parameter"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"max_tokens": 5000}, "max_tokens", "4096"),
        ({"max_tokens": 0}, "max_tokens", "only for echo"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [""]}, "stop", "1 to 1024 characters"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": ""}, "prompt", "must have either"),
        ({"prompt": {"a": 1}}, "prompt", "array"),
        ({"prompt": [1.5]}, "prompt", "must be a text"),
        ({"prompt": [10_000_000]}, "prompt", "token"),
        ({"prompt": ["a"] * 65}, "prompt", "1 to 64"),
        ({"prompt": ["a"] * 64, "n": 5}, "n", "256 answers"),
        ({"best_of": 3}, "best_of", "not carried out"),
        ({"suffix": "x"}, "suffix", "not carried out"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not carried out"),
        ({"logit_bias": {"50256": -100}}, "logit_bias", "not carried out"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only for stream"),
    ],
)
def test_what_cannot_be_asked_names_the_parameter(
    client: OpenAI, changes: dict[str, Any], param: str, words: str
) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1, **changes}
    with pytest.raises(BadRequestError, match=words) as caught:
        client.post("/completions", body=body, cast_to=object)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": "sad"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": "x" * 70_000}]}, "messages"),
        ({"tools": [3]}, "tools[0]"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"store": True}, "store"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"functions": []}, "functions"),
    ],
)
def test_what_a_chat_cannot_ask_names_the_parameter(client: OpenAI, changes: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 1, **changes}
    with pytest.raises(BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.param == param


def test_what_does_not_change_an_answer_is_taken(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=1,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        tool_choice="none",
    )
    assert len(answer.choices) == 1


def test_tools_and_their_calls_reach_the_template(client: OpenAI, with_tools: str) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Reykjavik"}'}}
    told: Any = [
        {"role": "user", "content": "Cold?"},
        {"role": "assistant", "content": None, "tool_calls": [called], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "2 C"},
    ]

    def prompt_tokens(**more: Any) -> int:
        answer = client.chat.completions.create(model=with_tools, max_tokens=1, **{"messages": told[:1], **more})
        assert answer.usage is not None
        return int(answer.usage.prompt_tokens)

    alone = prompt_tokens()
    assert prompt_tokens(tools=tools) > alone + 10
    assert prompt_tokens(tools=tools, tool_choice="none") == alone
    assert prompt_tokens(messages=told, tools=tools) > prompt_tokens(messages=[told[0], told[2]], tools=tools) + 2


def test_models_of_others_do_not_answer(connect: Connect, tuned: str) -> None:
    bob = connect("bob")
    for name in (MODEL, tuned, f"{tuned.rpartition(':')[2]}@last", "gpt-4o"):
        with pytest.raises(NotFoundError) as caught:
            bob.completions.create(model=name, prompt="a")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(NotFoundError):
            bob.chat.completions.create(model=name, messages=CHAT, stream=True)
    with pytest.raises(PermissionDeniedError, match="viewer"):
        connect("eve", role="viewer").completions.create(model=tuned, prompt="a")


def test_a_caller_who_leaves_frees_the_node(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": ["The lab box"] * 8, "max_tokens": 1000, "temperature": 0}
    with pytest.raises(APITimeoutError):
        client.with_options(timeout=1.0).completions.create(**asked)
    stream = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    # Else this one would wait for the others, which take far longer.
    assert client.with_options(timeout=240.0).completions.create(model=MODEL, prompt="a", max_tokens=1).choices
