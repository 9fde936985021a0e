"""What is trained in ChatML, Llama-3, Mistral, Gemma and Phi styles: as the golden files say, and as derived in another
way."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.datasets.mask_goldens import CHAT, FOLDER, STYLES, TRAIN_ON, codec_of, masks_of, template_of
from transformers.utils.chat_template_utils import render_jinja_template

# The token that ends an assistant's turn in each style, and that of a tool call where it is another.
END_OF_TURN = {
    "chatml": ("<|im_end|>", "<|im_end|>"),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "mistral": ("</s>", "</s>"),
    "gemma": ("<end_of_turn>", "<end_of_turn>"),
    "phi": ("<|end|>", "<|end|>"),
}
CUE = {
    "chatml": "<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<start_of_turn>model\n",
    "phi": "<|assistant|>\n",
}


def golden(style: str, train_on: str) -> dict[str, Any]:
    whole: dict[str, dict[str, Any]] = json.loads((FOLDER / f"{style}.json").read_text("ascii"))
    return whole[train_on]


def replies_in(style: str, text: str) -> list[tuple[int, int]]:
    """Find the assistant's turns by reading the text alone: from the cue, or an instruction's end, to the end-of-turn
    token."""
    spans = []
    at = 0
    for message in CHAT:
        if message["role"] != "assistant":
            continue
        if style == "mistral":
            start = min(
                text.find(end, at) + len(end) for end in ("[/INST]", "[/TOOL_RESULTS]") if text.find(end, at) >= 0
            )
        else:
            start = text.index(CUE[style], at) + len(CUE[style])
        mark = END_OF_TURN[style]["tool_calls" in message]
        at = text.index(mark, start) + len(mark)
        assert message["content"] in text[start:at]
        spans.append((start, at))
    return spans


def wanted_spans(style: str, train_on: str, text: str) -> list[tuple[int, int]]:
    replies = replies_in(style, text)
    if train_on == "last-assistant":
        return replies[-1:]
    if train_on == "assistant":
        return replies[1:]  # the first has weight 0
    # All but the whole turn that has weight 0, its header included.
    header = 0 if style == "mistral" else len(CUE[style])
    behind = 1 if style in ("chatml", "gemma", "phi") else 0  # a line break closes the turn
    (start, end), *_ = replies
    return [(0, start - header), (end + behind, len(text))]


@pytest.mark.parametrize("train_on", TRAIN_ON)
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_masks_are_those_of_the_golden_files(style: str, marked: bool, train_on: str, demo_model: Path) -> None:
    codec = codec_of(style, demo_model, marked=marked)
    assert masks_of(codec, train_on) == golden(style, train_on)


@pytest.mark.parametrize("train_on", TRAIN_ON)
@pytest.mark.parametrize("style", STYLES)
def test_the_golden_files_agree_with_another_derivation(style: str, train_on: str, demo_model: Path) -> None:
    """transformers renders the text; turns are found by reading it; the mask by encoding each stretch of it apart."""
    wanted = golden(style, train_on)
    codec = codec_of(style, demo_model, marked=False)
    special: dict[str, Any] = {f"{key}_token": STYLES[style][key] for key in ("bos", "eos") if key in STYLES[style]}
    chat = [{key: value for key, value in message.items() if key != "weight"} for message in CHAT]
    options: dict[str, Any] = {"chat_template": template_of(style, marked=False), **special}
    (text,), _ = cast("tuple[list[str], list[object]]", render_jinja_template([chat], **options))
    assert text == wanted["text"]
    spans = wanted_spans(style, train_on, text)
    borders = sorted({0, len(text), *(border for span in spans for border in span)})
    tokens: list[str] = []
    for begin, end in itertools.pairwise(borders):
        bit = int(any(start <= begin < stop for start, stop in spans))
        # Phi's special tokens swallow the white space behind them, on whichever side of a border it is.
        stretch = text[begin:end].lstrip() if STYLES[style].get("rstrip") else text[begin:end]
        tokens += [f"{bit} {codec.tokenizer.id_to_token(token)}" for token in codec.encode_ids(stretch)]
    assert tokens == wanted["tokens"]
    trained = "".join(text[start:end] for start, end in spans)
    # Nothing precedes the first token of a document, so it is never trained.
    trained = trained if spans[0][0] else trained[len(wanted["tokens"][0]) - 2 :]
    assert "".join("".join(wanted["trained"]).split()) == "".join(trained.split())
