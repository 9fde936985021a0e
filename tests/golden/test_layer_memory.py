"""What layers are counted to keep is what the engine finds them to keep, at lengths that were not counted."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from bench import long_rows
from tests.support.further import further
from tests.support.plans import ledger_of
from tests.support.tiny_models import Engine, TinyModel

from horizon_server.engine.layer_memory import measure_layer_memory
from horizon_server.planning.layer_probe import LayerProbe
from horizon_server.planning.ledger import LARGE_BLOCK_BYTES, LayerMemory
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.process_variables import CHILD_VARIABLES
from horizon_server.settings import child_environment


def write(model: TinyModel, folder: Path) -> Path:
    reference: Any = model.reference()
    reference.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "architecture", ["mamba", "qwen3_next", "llama", *further("mamba2", "olmo_hybrid", "xlstm", "bloom")]
)
def test_a_count_at_two_lengths_tells_a_third(
    architecture: str,
    engine: Engine,
    tmp_path: Path,
) -> None:
    model = engine.tiny_model(architecture, max_position_embeddings=512)
    counted = measure_layer_memory(write(model, tmp_path / "model"), lengths=(64, 128))

    report = engine.start(model).trainer.train_step([engine.pack(engine.documents(256))])

    # The engine leaves out one product of some layers, and counts all that a row's layers are called with.
    assert 0.85 < counted.at(256) / report.device_memory_bytes["workspace"] < 1.25


@pytest.mark.parametrize(
    "architecture",
    ["falcon", "bamba", *further("bloom", "kimi_linear", "openai-gpt", "deepseek_v32")],
)
def test_the_plan_of_a_counted_model_is_what_its_layers_hold(architecture: str, tmp_path: Path) -> None:
    long_rows.write_model(tmp_path, architecture, 1280)
    plan = long_rows.planned(tmp_path, (1280,))
    held = long_rows.account(tmp_path, (1280,))
    assert 0.9 < held["workspace"] / plan.device_bytes["workspace"] <= 1.0


def test_the_widest_moment_of_a_layer_is_counted(engine: Engine, tmp_path: Path) -> None:
    """What attention without a fused kernel takes: probabilities and two gradients of them, in fp32 for each head."""
    model = engine.tiny_model("bloom")
    counted = measure_layer_memory(write(model, tmp_path / "model"), lengths=(256, 512))
    num_heads = open_model_folder(tmp_path / "model").shape.num_attention_heads
    assert counted.peak_per_pair == pytest.approx(3 * 4 * num_heads, rel=0.1)
    assert counted.peak_at(1024) > counted.at(1024) and counted.call_at(1024) > 0


def test_large_blocks_are_those_that_a_worker_gives_back() -> None:
    assert int(CHILD_VARIABLES["MALLOC_MMAP_THRESHOLD_"]) == LARGE_BLOCK_BYTES
    memory = LayerMemory(
        bytes_per_token=1, bytes_per_pair=0, peak_per_token=3 << 16, blocks_per_token=(1 << 17, 1 << 10)
    )
    # Below the size all of it stays and more; above it the large block counts once.
    assert memory.heap_at(256) > 2 * memory.peak_at(256)
    assert memory.heap_at(512) - 512 * (1 << 17) < 3 * 512 * (1 << 16)


def test_the_plan_of_a_recurrent_model_holds_what_was_counted(engine: Engine, tmp_path: Path) -> None:
    probe = LayerProbe(child_environment())
    folder = open_model_folder(write(engine.tiny_model("mamba2"), tmp_path / "mamba2"))
    layer = probe(folder)
    assert layer is not None and layer == probe(folder)

    def planned(counted: LayerMemory | None) -> int:
        return ledger_of(
            folder.layout,
            folder.shape,
            tokens_per_step=4096,
            sequence_length=1024,
            device_kind="host",
            grad_bytes=4,
            layer=counted,
        ).host_total_bytes

    assert planned(layer) > planned(None) + layer.at(1024) // 2
    assert planned(dataclasses.replace(layer, bytes_per_token=0, bytes_per_pair=0)) == planned(None)


def test_a_model_of_attention_alone_is_not_counted(engine: Engine, tmp_path: Path) -> None:
    folder = open_model_folder(write(engine.tiny_model("llama"), tmp_path / "llama"))
    assert LayerProbe({"PATH": os.defpath})(folder) is None


def test_a_child_that_fails_leaves_the_formulas(engine: Engine, tmp_path: Path) -> None:
    folder = open_model_folder(write(engine.tiny_model("mamba"), tmp_path / "mamba"))
    (tmp_path / "mamba" / "config.json").write_text("{}")
    assert LayerProbe(child_environment())(folder) is None


def test_a_curve_through_two_counts_never_falls() -> None:
    assert LayerMemory.through((2, 4), (20, 40)).at(8) == 80
    assert LayerMemory.through((2, 4), (20 + 4, 40 + 16)).at(8) == 80 + 64
    assert LayerMemory.through((2, 4), (100, 120)).at(8) == 240
