"""Answers to 32 prompts at once, over one prompt after the other, and over transformers' generate on the same batch: on
the host device in fp32, tokens per second as ratios of the same run.

python -m bench.sampling              # about two minutes on two cores
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.generation.generator import TokenGenerator, generation_template
from horizon_server.engine.generation.sequences import GenerationOptions
from horizon_server.engine.template import Template
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.sampling import sample_layout
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model

_NUM_PROMPTS, _NUM_NEW = 32, 32


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each, whose median counts")
    parser.add_argument("--resident", action="store_true", help="keep the layers in fp32, as transformers does")
    arguments = parser.parse_args()
    torch.set_num_threads(available_cpus())
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model: Any = AutoModelForCausalLM.from_config(config).float().train(False)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        generator = _generator(Path(folder), resident_layers=8 if arguments.resident else 0)
    drawn = torch.Generator().manual_seed(1)
    lengths = torch.randint(20, 60, (_NUM_PROMPTS,), generator=drawn).tolist()
    prompts = [torch.randint(3, 8000, (length,), generator=drawn).tolist() for length in lengths]
    options = GenerationOptions(max_tokens=_NUM_NEW)
    ids, mask = (torch.zeros(_NUM_PROMPTS, max(lengths), dtype=torch.int64) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = torch.tensor(prompt), 1

    def by_transformers() -> None:
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=_NUM_NEW,
                max_new_tokens=_NUM_NEW,
                pad_token_id=0,
            )

    ways: dict[str, Callable[[], object]] = {
        "one prompt after the other": lambda: [generator.generate([prompt], options) for prompt in prompts],
        "all at once": lambda: generator.generate(prompts, options),
        "transformers' generate": by_transformers,
    }
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.runs):
        for name, way in ways.items():
            start_s = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start_s)
    print("| what | tokens/s |\n| --- | --- |")
    for name, found in seconds.items():
        print(f"| {name} | {_NUM_PROMPTS * _NUM_NEW / median(found):,.0f} |")
    alone, together, theirs = seconds.values()
    print(f"\nall at once over one after the other: {_ratio(alone, together)}")
    print(f"all at once over transformers: {_ratio(theirs, together)}")


def _ratio(theirs: list[float], ours: list[float]) -> str:
    """Of runs that stand beside each other, so that both see the same machine."""
    found = sorted(one / other for one, other in zip(theirs, ours, strict=True))
    return f"{median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def _generator(folder: Path, *, resident_layers: int) -> TokenGenerator:
    layout = sample_layout(open_model_folder(folder))
    store = HostStore.allocate(layout, grad_dtype=None)
    load_model(store, folder)
    template = generation_template(lambda own: Template.from_folder(folder, layout=layout, own_attention=own))
    device = HostDevice(num_threads=available_cpus())
    return TokenGenerator(template, store, device, resident_layers=resident_layers)


if __name__ == "__main__":
    main()
