"""The child that answers prompts: what it reads of a prompt and a folder, what it sends, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import write_adapter_checkpoint
from tests.support.scripted_calls import answered, ask
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_formats.formats import DatasetFormat
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.rendering import Chat, normalise
from horizon_server.demo.recipe import write_demo_model
from horizon_server.engine.generation.sequences import NewToken
from horizon_server.errors import DoesNotFit, HorizonError, InvalidData, InvalidModel
from horizon_server.events import SampledText
from horizon_server.records.sample import (
    MAX_PROMPT_TOKENS,
    SampleAdapter,
    SampleMessage,
    SampleModel,
    SamplePrompt,
)
from horizon_server.services.sampling import _memory
from horizon_server.store.manifest import read_manifest
from horizon_server.store.pages import MOST_PAGE_ELEMENTS
from horizon_server.worker import answering, sampling
from horizon_server.worker.answering import _AnswerWriter, encoded, stop_tokens

BOX = SamplePrompt(text="The lab box")
CHAT = SamplePrompt(messages=(SampleMessage(role="user", content="Who are you?"),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("sampling") / "model")


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return TextCodec.from_folder(folder)


def model_of(folder: Path, **changes: Any) -> SampleModel:
    return SampleModel(**{"folder": folder, "num_threads": 1, "cache_bytes": 2**30, **changes})


def test_the_answers_of_a_call_are_those_of_each_prompt_alone(folder: Path) -> None:
    both = answered(model_of(folder), [ask(1, BOX, CHAT)])
    alone = answered(model_of(folder), [ask(1, CHAT)])

    assert both.text(1, 1) == alone.text(1) != ""
    assert [line.ended for line in both.lines[1] if isinstance(line, SampledText) and line.ended] == ["length"] * 2
    assert both.figures(1).num_tokens == 16
    assert both.figures(1).duration_s > 0


def test_the_answers_of_a_model_that_stayed_are_those_of_a_new_child(folder: Path) -> None:
    drawn: dict[str, Any] = {"temperature": 0.9, "seed": 7}
    long: dict[str, Any] = {"max_tokens": 40, "temperature": 1.3}
    prompts = (SamplePrompt(text="The lab box " * 30), CHAT)
    # The next one comes when the one before it has ended.
    orders = [ask(1, CHAT, **drawn)], [ask(2, *prompts, **long)], [ask(3, CHAT, **drawn)]
    stayed = answered(model_of(folder), orders[0], *[[]] * 8, orders[1], *[[]] * 40, orders[2])
    fresh = answered(model_of(folder), [ask(1, CHAT, **drawn)])

    assert stayed.text(1) == stayed.text(3) == fresh.text(1) != ""
    fresh = answered(model_of(folder), [ask(1, *prompts, **long)])
    assert [stayed.text(2, 0), stayed.text(2, 1)] == [fresh.text(1, 0), fresh.text(1, 1)]


def test_a_mixture_answers_in_pages_where_its_weights_do_not_stay(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "mixture", ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=64,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"],
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "mixture")
    memory = _memory(tmp_path / "mixture", None)
    # One page has them all; a model of gigabytes has several.
    assert memory.expert_page_elements == MOST_PAGE_ELEMENTS
    assert _memory(folder, None).expert_page_elements == 0
    kept = memory.for_room(4 * (memory.total + memory.kept))
    assert (kept.keeps_weights, kept.expert_page_elements) == (True, 0)
    found = [
        answered(model_of(tmp_path / "mixture", **how), [ask(1, BOX, CHAT)])
        for how in ({"expert_page_elements": 20_000}, {"keeps_weights": True}, {})
    ]
    assert found[0].text(1) == found[1].text(1) == found[2].text(1) != ""
    assert found[0].text(1, 1) == found[1].text(1, 1)


def test_a_chat_is_rendered_with_the_cue_for_an_answer(codec: TextCodec) -> None:
    assert codec.decode(encoded(codec, 0, CHAT)).endswith("<|im_start|>assistant\n")


WEATHER = {"type": "function", "function": {"name": "weather"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
WITH_TOOLS = {
    "tools": [WEATHER],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Rome?"}], "weight": 0},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "20 C"},
    ],
}


def test_tools_and_their_calls_are_rendered_as_in_training(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{{ tools }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{{ m.tool_calls }}{{ m.tool_call_id "
        "}}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    codec = TextCodec.from_folder(model)
    prompt = SamplePrompt(chat_json=json.dumps(WITH_TOOLS))
    row = normalise(WITH_TOOLS, DatasetFormat.MESSAGES, {})
    assert isinstance(row, Chat) and codec.chat_template is not None
    wanted = codec.chat_template.render(row.messages, tools=row.tools)
    assert "weather" in wanted and "{'city': 'Rome'}" in wanted and "Rome?" in wanted
    assert codec.decode(encoded(codec, 0, prompt)) == f"{wanted}<|im_start|>assistant"


@pytest.mark.parametrize(
    ("chat_json", "why"),
    [
        ("{", "has a chat_json that is not JSON"),
        ("[" * 50_000, "has a chat_json that is not JSON"),
        ("[]", "is not an object with messages"),
        ('{"tools": []}', "cannot be used: messages is missing"),
        ('{"messages": []}', "it must be a non-empty list of messages"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\]\.content is missing or null"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": 3}', "tools is 3; it must be a list"),
        (json.dumps({"messages": [{"role": "user", "content": "a"}] * 257}), "has 257 messages; at most 256"),
    ],
)
def test_a_chat_with_a_defect_is_named(codec: TextCodec, chat_json: str, why: str) -> None:
    with pytest.raises(InvalidData, match=rf"prompts\[2\] .*{why}"):
        encoded(codec, 2, SamplePrompt(chat_json=chat_json))


def test_a_prompt_that_cannot_be_used_is_named(codec: TextCodec, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=rf"prompts\[3\] has \d+ tokens; it must have 1 to {MAX_PROMPT_TOKENS}"):
        encoded(codec, 3, SamplePrompt(text="a b " * MAX_PROMPT_TOKENS))
    plain = shutil.copytree(folder, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    with pytest.raises(InvalidData, match=r"prompts\[1\] has messages, and the model has no chat template"):
        encoded(TextCodec.from_folder(plain), 1, CHAT)


def test_a_template_that_never_ends_is_ended(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = shutil.copytree(folder, tmp_path / "endless")
    (endless / "chat_template.jinja").write_text(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(sampling, "RENDER_S", 0.3)
    with pytest.raises(InvalidModel, match=r"chat template takes more than 0\.3 s"):
        answered(model_of(endless), [ask(1, CHAT)]).figures(1)


def test_what_takes_more_than_the_cache_may_have_is_refused_with_the_numbers(folder: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"1 prompts with answers of up to 8 tokens take .* MiB"):
        answered(model_of(folder, cache_bytes=100), [ask(1, BOX)]).figures(1)


def test_an_answer_ends_with_what_the_folder_says(codec: TextCodec, folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copied")
    assert codec.eos_id in stop_tokens(copied, codec)
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert stop_tokens(copied, codec) >= {5, 6, codec.eos_id}
    (copied / "generation_config.json").unlink()
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert stop_tokens(copied, codec) == {9, codec.eos_id}


def test_an_answer_ends_with_what_the_checkpoint_of_an_adapter_says(folder: Path, tmp_path: Path) -> None:
    first = answered(model_of(folder), [ask(1, BOX)])
    codec = TextCodec.from_folder(folder)
    # What the model writes first ends its answer, where the folder next to the weights says so.
    begin = codec.encode_ids(first.text(1))[0]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, begin]}))
    ended = answered(model_of(folder, answers=tmp_path), [ask(1, BOX)])
    last = ended.lines[1][-2]
    assert isinstance(last, SampledText)
    assert (ended.text(1), ended.figures(1).num_tokens, last.ended) == ("", 1, "stop")


def test_a_broken_generation_config_lists_nothing(codec: TextCodec, folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copied")
    for broken in ("{", "[1]", '{"eos_token_id": "x"}', "[" * 100_000):
        (copied / "generation_config.json").write_text(broken)
        assert stop_tokens(copied, codec) == {codec.eos_id}


def test_text_is_sent_in_whole_characters(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_TEXT_EVERY_S", 0.0)
    sent: list[SampledText] = []
    writer = _AnswerWriter(4, 0, codec, (), sent.append)  # type: ignore[arg-type]
    text = "na\u00efve \u4e2d\u6587 \U0001f600!"
    ids = codec.encode_ids(text)
    for token in ids:
        writer.add(NewToken(prompt=4, token=token, ended=None))
    writer.add(NewToken(prompt=4, token=codec.eos_id or 0, ended="stop"))

    assert "".join(line.text for line in sent) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in line.text for line in sent)
    assert len(sent) > 3
    last = sent[-1]
    assert (last.prompt, last.text, last.num_tokens, last.ended) == (4, "", len(ids) + 1, "stop")
    assert [token for line in sent for token in line.tokens] == [*ids, codec.eos_id or 0]


def test_an_error_does_not_say_where_checkpoints_are(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "model.safetensors.index.json").unlink(missing_ok=True)
    for file in broken.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(HorizonError) as caught:
        answered(model_of(broken), [ask(1, BOX)])
    assert str(tmp_path) not in caught.value.message
    assert isinstance(caught.value, InvalidModel)


def test_an_adapter_answers_as_its_merged_model_does(folder: Path, tmp_path: Path) -> None:
    checkpoint = write_adapter_checkpoint(tmp_path / "checkpoint", folder, export="both")
    base = read_manifest(checkpoint).base
    assert base is not None
    adapter = SampleAdapter(folder=checkpoint, base_sha256=base.sha256, digests=tmp_path / "digests")
    alone = answered(model_of(folder), [ask(1, CHAT)])
    adapted = answered(model_of(folder, adapter=adapter), [ask(1, CHAT)])
    merged = answered(model_of(checkpoint / "merged"), [ask(1, CHAT)])

    assert adapted.text(1) == merged.text(1) != alone.text(1)
    other = model_of(folder, adapter=replace(adapter, base_sha256="0" * 64))
    with pytest.raises(InvalidModel, match="the model is not the one that the checkpoint's adapter was trained on"):
        answered(other, [ask(1, CHAT)])
