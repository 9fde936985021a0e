"""What a node with a GPU of 141 GB and 1.5 TB of host memory trains of the largest open models, by the planner itself.

A forecast, not a measurement: the folders have the models' configurations and the headers of their weights and none of
their bytes, the rates of the GPU are estimated from data sheets (`planning/gpus.py`), and those of four drives of PCIe
5, with what they are rated for, are what such drives are sold as. docs/larger.md shows the table, and a test keeps it
equal to what this prints.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_server.errors import InvalidSpec
from horizon_server.planning.drives import NodeDrives
from horizon_server.planning.gpus import estimated_rates, gpu_named
from horizon_server.planning.machine import Accelerator, HostMemory
from horizon_server.planning.planner import Planner
from horizon_server.planning.rates import DriveRates
from horizon_server.records.plan import Plan
from horizon_server.settings import load_settings
from horizon_server.spec import JobSpec, parse_job_spec
from horizon_server.store.model_files import CONFIG_FILE
from horizon_server.store.safetensors_files import write_outline

GPU, HOST_GBPS, HOST_BYTES = "h200", 400.0, 1_500 * 10**9
NUM_TOKENS, ROW_TOKENS = 32_768, 4_096
DRIVES = NodeDrives(
    folders=tuple(f"/drives/{number}" for number in range(4)),
    rates=DriveRates(read_bytes_per_s=27e9, write_bytes_per_s=11e9),
    endurance_bytes=4 * 14 * 10**15,
)
_GIGA = 1e9

DENSE: Mapping[str, Any] = {
    "model_type": "llama",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    # transformers' defaults are the numbers of openai/gpt-oss-120b.
    "gpt-oss-120B": {"model_type": "gpt_oss"},
    # The shape of Mistral Large 2.
    "123B, dense": {
        **DENSE,
        "hidden_size": 12288,
        "intermediate_size": 28672,
        "num_hidden_layers": 88,
        "num_attention_heads": 96,
        "vocab_size": 32768,
    },
}
# Of the shape of Llama 3.1 70B, with any number of layers.
_GROWING = {
    **DENSE,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "vocab_size": 128256,
}
_MOST_LAYERS = 1000
_ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to train: a title, and what the spec says."""

    title: str
    train: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)


_COMPRESSED, _DRIVE = {"optimizer_states": "compressed"}, {"tier": "drive", "accept_wear": True}
FORMS = (
    Form(title="exact, clipping"),
    Form(title="exact, no clipping", train={"max_grad_norm": None}),
    Form(title="compressed, clipping", train=_COMPRESSED),
    Form(title="exact, clipping, drives", memory=_DRIVE),
    Form(title="compressed, clipping, drives", train=_COMPRESSED, memory=_DRIVE),
    Form(title="compressed, clipping, experts in pages", train=_COMPRESSED, memory={"experts": "paged"}),
    Form(title="LoRA", train={"trainable": "lora"}),
)


def write_model_outline(config: Mapping[str, Any], folder: Path) -> None:
    """Make a folder with a model's configuration and the headers of its weights, in bf16, and none of their bytes. Its
    layers are all alike."""
    known = AutoConfig.for_model(**config)
    with torch.device("meta"):
        one_layer: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(**{**config, **_ONE_LAYER})
        )
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(known.to_dict()), "utf-8")
    tensors = [
        (name.replace(".layers.0.", f".layers.{layer}."), "BF16", tuple(value.shape))
        for name, value in one_layer.state_dict().items()
        if not (known.tie_word_embeddings and name.startswith("lm_head."))
        for layer in (range(known.num_hidden_layers) if ".layers.0." in name else [0])
    ]
    write_outline(folder / "model.safetensors", tensors)


@contextmanager
def outline(config: Mapping[str, Any]) -> Iterator[Path]:
    """A folder of `write_model_outline`, while it is needed."""
    with tempfile.TemporaryDirectory() as name:
        write_model_outline(config, Path(name))
        yield Path(name)


def spec_of(form: Form, *, num_tokens: int) -> JobSpec:
    """A job with steps of that many tokens."""
    train = {"max_steps": 1000, "tokens_per_step": num_tokens, "sequence_length": ROW_TOKENS, **form.train}
    spec = {"name": "giant", "model": "giant", "dataset": "rows", "device": "cuda", "train": train}
    return parse_job_spec({**spec, "memory": dict(form.memory)})


def plan_of(folder: Path, form: Form, *, num_tokens: int) -> Plan:
    """Of a job with steps of that many tokens, on the machine above."""
    memory, gpu = HostMemory(limit_bytes=HOST_BYTES, available_bytes=HOST_BYTES), gpu_named(GPU)
    planner = Planner(
        load_settings(),
        memory=lambda: memory,
        num_threads=32,
        accelerators=(Accelerator(index=0, name=gpu.device_name, memory_bytes=gpu.memory_bytes),),
        rates=lambda: {"cuda": estimated_rates(GPU, host_bytes_per_s=HOST_GBPS * _GIGA)},
        drives=DRIVES,
    )
    return planner.plan(spec_of(form, num_tokens=num_tokens), folder)


def table(num_tokens: int = NUM_TOKENS) -> list[str]:
    """What fits, how fast it is and what limits it, as lines of Markdown."""
    lines = [
        "| model | form | host, GB | GPU, GB | drives, GB a step | fits | tokens/s | bound by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, config in MODELS.items():
        with outline(config) as folder:
            for form in FORMS:
                try:
                    plan = plan_of(folder, form, num_tokens=num_tokens)
                except InvalidSpec:
                    # A dense model has no experts.
                    continue
                assert plan.prediction is not None, "the GPU is in the table"
                host, device = plan.host_total_bytes / _GIGA, plan.device_total_bytes / _GIGA
                speed = f"{plan.prediction.tokens_per_second:,.0f} | {plan.prediction.bound}" if plan.fits else "- | -"
                written = f"{plan.drives.num_bytes / _GIGA:,.0f}" if plan.drives is not None else "-"
                fits = "yes" if plan.fits else "no"
                lines.append(f"| {name} | {form.title} | {host:,.0f} | {device:,.0f} | {written} | {fits} | {speed} |")
    return lines


def largest(form: Form, *, num_tokens: int) -> Plan:
    """Of the largest dense model that fits."""

    def plan(num_layers: int) -> Plan:
        with outline({**_GROWING, "num_hidden_layers": num_layers}) as folder:
            return plan_of(folder, form, num_tokens=num_tokens)

    # The first that does not fit, less one.
    num_layers = bisect_left(range(_MOST_LAYERS), True, lo=1, key=lambda number: not plan(number).fits) - 1
    return plan(num_layers)


def largest_table(num_tokens: int) -> Iterator[str]:
    """How large a dense model fits by each form, and what its steps cost, line by line."""
    yield "| form | 10^9 parameters | s a step | tokens/s | bound by | drives, GB a step | steps that wear them out |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for form in FORMS:
        if "experts" in form.memory:
            continue
        plan = largest(form, num_tokens=num_tokens)
        assert plan.prediction is not None, "the GPU is in the table"
        use, step_s = plan.drives, plan.prediction.step_s
        wear = "- | -"
        if use is not None and use.endurance_bytes is not None:
            wear = f"{use.num_bytes / _GIGA:,.0f} | {use.endurance_bytes / use.num_bytes:,.0f}"
        yield (
            f"| {form.title} | {plan.num_parameters / 1e9:.0f} | {step_s:.0f} | {num_tokens / step_s:,.0f} "
            f"| {plan.prediction.bound} | {wear} |"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="tokens of a step (default %(default)s)")
    parser.add_argument("--largest", action="store_true", help="the largest dense model that fits, too")
    parser.add_argument(
        "--rehearse",
        nargs="?",
        const="all",
        choices=["all", "forms", "drives"],
        help="real steps of narrow models instead: of the forms, over an emulated drive, or both",
    )
    parser.add_argument("--width", type=int, default=16, help="of the rehearsal, the part of the width (default 16)")
    parser.add_argument("--drive", help="of the rehearsal, a folder on a drive; default: a temporary one")
    arguments = parser.parse_args()
    if arguments.rehearse:
        # It needs this module.
        from bench.giant_rehearsal import print_tables

        with tempfile.TemporaryDirectory() as temporary:
            print_tables(arguments.rehearse, width=arguments.width, drive=arguments.drive or temporary)
        return
    print("\n".join(table(arguments.tokens)))
    if arguments.largest:
        print()
        for line in largest_table(arguments.tokens):
            print(line, flush=True)


if __name__ == "__main__":
    main()
