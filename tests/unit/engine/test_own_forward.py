"""The engine calls layers as the model's class does: classes that count positions in another way are refused, and
nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.tiny_models import ARCHITECTURES, MIXES_DOCUMENTS, config_of, template_of
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_server.engine.template import Template
from horizon_server.errors import InvalidModel

SIZES = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "is_decoder": True,
}


def folder_of(model_type: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


def test_a_class_that_counts_positions_after_the_padding_is_refused(tmp_path: Path) -> None:
    # It was trained with rows of its table of positions that it never uses: a loss of 5.76908 where its own is 5.74883.
    with pytest.raises(InvalidModel, match="'xlm-roberta-xl': its class counts positions otherwise than 0, 1, 2"):
        Template.from_folder(folder_of("xlm-roberta-xl", tmp_path))


@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "camembert"])
def test_the_relatives_of_roberta_are_refused_in_a_sentence(tmp_path: Path, model_type: str) -> None:
    with pytest.raises(InvalidModel, match=r"tensor roberta\.embeddings\.LayerNorm\.weight is used before the layers"):
        Template.from_folder(folder_of(model_type, tmp_path))


@pytest.mark.parametrize("model_type", [*ARCHITECTURES, *MIXES_DOCUMENTS])
def test_every_tested_architecture_passes(model_type: str) -> None:
    assert template_of(config_of(model_type)).num_layers


def test_a_config_that_lists_several_ends_passes() -> None:
    # As those of Llama 3 and Gemma 3 do.
    config = config_of("llama")
    config.eos_token_id = [1, 2]
    assert template_of(config).num_layers
