"""Experts in pages (`memory.experts: paged`) against whole layers: processor seconds and bytes that go to the device,
of a training step, of a step of adapters over 16 tokens, and of a token of an answer.

Both take turns on the host device in fp32, where copies are the processor's work too, so what the machine does besides
meets both. Whole layers compute experts as transformers does by default, and one by one as pages do.

python -m bench.pages              # about two minutes on two cores
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.generation.generator import TokenGenerator, generation_template
from horizon_server.engine.generation.sequences import GenerationOptions
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.trainable import open_for_training
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution
from horizon_server.spec import LoraSpec, TrainSpec
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import StoreLayout

NUM_THREADS = 2
_VOCABULARY = 1024
_WAYS = {"whole, default": ("grouped_mm", 0), "whole, one by one": ("eager", 0), "paged": ("eager", 1 << 20)}


def _config(experts: str) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=128,
        moe_intermediate_size=64,
        intermediate_size=128,
        num_experts=128,
        num_experts_per_tok=4,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=_VOCABULARY,
        max_position_embeddings=1024,
        experts_implementation=experts,
    )
    return config


def _store(layout: StoreLayout) -> HostStore:
    """The same random weights for each."""
    store, generator = HostStore.allocate(layout, num_threads=NUM_THREADS), torch.Generator().manual_seed(1)
    for _, tensor in layout.tensors():
        store.write_master(tensor.name, 0.1 * torch.randn(tensor.shape, generator=generator))
    return store


def _row(num_tokens: int) -> MicroBatch:
    return MicroBatch(
        input_ids_T=torch.randint(_VOCABULARY, (num_tokens,)),
        position_ids_T=torch.arange(num_tokens),
        labels_T=torch.randint(_VOCABULARY, (num_tokens,)),
        document_lengths=(num_tokens,),
    )


class _Steps:
    """Steps of one way to compute."""

    def __init__(self, config: PretrainedConfig, layout: StoreLayout, num_tokens: int, elements: int) -> None:
        template = Template.from_config(config, layout=layout)
        self._device = HostDevice(num_threads=NUM_THREADS)
        recipe = Recipe(learning_rate=1e-5, tokens_per_step=num_tokens, sequence_length=num_tokens)
        execution = Execution(
            device_kind="host",
            compute_dtype="float32",
            grad_bytes=4,
            optimizer_threads=NUM_THREADS,
            expert_page_elements=elements,
        )
        self._trainer = Trainer(template, _store(layout), self._device, recipe, execution, num_steps=100)
        self._row = _row(num_tokens)

    def run(self) -> int:
        """A step; returns the bytes that went up."""
        figures = self._trainer.train_step([self._row])
        self._trainer.flush()
        return figures.h2d.bytes

    def close(self) -> None:
        """Free everything."""
        self._trainer.close()
        self._device.close()


class _Answers:
    """Answers of one way to compute."""

    def __init__(self, config: PretrainedConfig, layout: StoreLayout, num_answers: int, elements: int) -> None:
        template = generation_template(lambda own: Template.from_config(config, layout=layout, own_attention=own))
        self._device = HostDevice(num_threads=NUM_THREADS)
        store = _store(layout)
        self._generator = TokenGenerator(template, store, self._device, expert_page_elements=elements)
        options = GenerationOptions(max_tokens=512, stop_tokens=frozenset())
        self._generator.add([[5 + index] for index in range(num_answers)], options)

    def run(self) -> int:
        """One token of each answer; returns the bytes that went up."""
        self._device.take_use()
        self._generator.step()
        return self._device.take_use().h2d.bytes

    def close(self) -> None:
        """Free everything."""
        self._generator.close()
        self._device.close()


def _measured(title: str, make: Callable[[str, int], _Steps | _Answers], rounds: int) -> list[str]:
    with ExitStack() as stack:
        runs = {}
        for way, (experts, elements) in _WAYS.items():
            runs[way] = make(experts, elements)
            stack.callback(runs[way].close)
        seconds: dict[str, list[float]] = {way: [] for way in runs}
        uploaded: dict[str, list[int]] = {way: [] for way in runs}
        for number in range(rounds + 1):
            for way, run in runs.items():
                start_s = time.process_time()
                num_bytes = run.run()
                # The first round finds room for everything.
                if number:
                    seconds[way].append(time.process_time() - start_s)
                    uploaded[way].append(num_bytes)
    ratios = [
        statistics.median(p / w for p, w in zip(seconds["paged"], seconds[way], strict=True))
        for way in ("whole, default", "whole, one by one")
    ]
    whole, pages = (statistics.median(uploaded[way]) for way in ("whole, default", "paged"))
    return [
        f"| {title} | {whole / 2**20:,.1f} MiB | {pages / 2**20:,.1f} MiB | {pages / whole:.2f} | "
        f"{ratios[0]:.2f} | {ratios[1]:.2f} |"
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of each, whose median counts")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(NUM_THREADS)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model: Any = AutoModelForCausalLM.from_config(_config("eager"))  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
        path = Path(folder)
        lora = TrainSpec(trainable=("lora",), lora=LoraSpec(rank=8, targets=("q_proj", "v_proj")))
        of_all, of_adapters = (open_for_training(path, spec).layout for spec in (TrainSpec(), lora))
    print("| 128 experts, 4 a token | up, whole | up, paged | paged / whole | seconds / default | / one by one |")
    print("| --- | --- | --- | --- | --- | --- |")
    lines = _measured("training, 512 tokens", lambda how, e: _Steps(_config(how), of_all, 512, e), rounds)
    lines += _measured("adapters, 16 tokens", lambda how, e: _Steps(_config(how), of_adapters, 16, e), rounds)
    for number in (1, 16):
        title = f"a token of {number} answers" if number > 1 else "a token of an answer"
        lines += _measured(title, lambda how, e, n=number: _Answers(_config(how), of_all, n, e), rounds)  # type: ignore[misc]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
