"""Answers to 32 prompts at once, over one prompt after the other, and over transformers' generate on the same batch: on
the host device in fp32, tokens per second as ratios of the same run. Then the same prompts through the child that
answers them on a node: in one call, in 32 calls at once, and in one call after the other.

python -m bench.sampling              # about four minutes on two cores
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from horizon_server.children.entry import Answer
from horizon_server.demo.recipe import write_demo_model
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.generation.generator import TokenGenerator, generation_template
from horizon_server.engine.generation.sequences import GenerationOptions
from horizon_server.engine.template import Template
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.sampling import CACHE_BYTES, sample_layout, sample_memory
from horizon_server.records.execution import Residency
from horizon_server.records.sample import SampleCall, SampleModel, SampleOptions, SamplePrompt
from horizon_server.services.sampling_child import SamplingChild, WantedModel
from horizon_server.settings import child_environment
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model

_NUM_PROMPTS, _NUM_NEW = 32, 32


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each, whose median counts")
    parser.add_argument("--streamed", action="store_true", help="keep no weights in fp32, as where memory is short")
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
    drawn = torch.Generator().manual_seed(1)
    lengths = torch.randint(20, 60, (_NUM_PROMPTS,), generator=drawn).tolist()
    prompts = [torch.randint(3, 8000, (length,), generator=drawn).tolist() for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        through_child = asyncio.run(_through_the_child(Path(folder), prompts, runs=arguments.runs))
        generator = _generator(Path(folder), resident_layers=0 if arguments.streamed else 8)
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
    print("\n| calls of the child | tokens/s |\n| --- | --- |")
    for name, found in through_child.items():
        print(f"| {name} | {1 / median(found):,.0f} |")
    one_call, calls, in_turn = through_child.values()
    print(f"\ncalls at once over one after the other: {_ratio(in_turn, calls)}")
    print(f"calls at once over one call: {_ratio(one_call, calls)}")


def _ratio(theirs: list[float], ours: list[float]) -> str:
    """Of runs that stand beside each other, so that both see the same machine."""
    found = sorted(one / other for one, other in zip(theirs, ours, strict=True))
    return f"{median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


async def _through_the_child(folder: Path, prompts: Sequence[Sequence[int]], *, runs: int) -> dict[str, list[float]]:
    """Seconds for a token of each way to ask, in turn."""
    other = write_demo_model(folder / "demo")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(other / name, folder / name)
    shutil.rmtree(other)
    child = SamplingChild(environment=child_environment(), free_bytes=lambda _: 1 << 40, keep_s=3600.0)
    wanted = WantedModel.of(SampleModel(folder=folder, num_threads=available_cpus(), cache_bytes=CACHE_BYTES))
    memory = sample_memory(sample_layout(open_model_folder(folder)))

    async def ask(*asked: Sequence[int]) -> int:
        call = SampleCall(
            prompts=tuple(SamplePrompt(ids=tuple(ids)) for ids in asked), options=SampleOptions(max_tokens=_NUM_NEW)
        )
        number = 0
        async for line in child.answer(wanted, call, memory, user="bench"):
            if isinstance(line, Answer):
                number = int(line.value[0]["num_tokens"])
        return number

    async def in_turn() -> int:
        return sum([await ask(prompt) for prompt in prompts])

    async def at_once() -> int:
        return sum(await asyncio.gather(*map(ask, prompts)))

    ways: dict[str, Callable[[], Awaitable[int]]] = {
        f"one call with {len(prompts)} prompts": lambda: ask(*prompts),
        f"{len(prompts)} calls of one prompt at once": at_once,
        "one call after the other": in_turn,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    try:
        await ask(prompts[0])
        for _ in range(runs):
            for name, way in ways.items():
                start_s = time.perf_counter()
                number = await way()
                seconds[name].append((time.perf_counter() - start_s) / number)
    finally:
        await child.close()
    return seconds


def _generator(folder: Path, *, resident_layers: int) -> TokenGenerator:
    layout = sample_layout(open_model_folder(folder))
    store = HostStore.allocate(layout, grad_dtype=None)
    load_model(store, folder)
    template = generation_template(lambda own: Template.from_folder(folder, layout=layout, own_attention=own))
    device = HostDevice(num_threads=available_cpus())
    residency = Residency(resident_layers=resident_layers, resident_head=resident_layers > 0)
    return TokenGenerator(template, store, device, residency=residency)


if __name__ == "__main__":
    main()
