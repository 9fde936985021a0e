"""Bytes of host memory against the plan, and how fast a model loads against reading its file.

A model folder with random bf16 weights is written; a process of its own then loads it into a store and trains two short
steps, and reports its peak RSS (VmHWM, memory files included) after the load and at the end. The plan comes from the
folder's headers, as the daemon makes it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from horizon_server.planning.ledger import plan_memory
from horizon_server.planning.trainable import open_for_training
from horizon_server.recipe import Recipe
from horizon_server.records.execution import ELEMENT_BYTES, ComputeDtype, Execution
from horizon_server.settings import child_environment
from horizon_server.spec import OptimizerStates, TrainSpec

ROW_TOKENS = 256
_SHAPES = ["6m", "36m", "40m", "0.6b", "mixtral-56m", "qwen3_moe-43m"]


def write_model(folder: Path, shape: str) -> None:
    """A folder as `save_pretrained` writes it, with random weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from bench.models import MOE_SHAPES, moe_config, qwen3_config

    config = moe_config(shape) if shape in MOE_SHAPES else qwen3_config(shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder / "model")


def train(folder: Path, *, clip: bool, num_threads: int, compute_dtype: ComputeDtype, states: OptimizerStates) -> None:
    """The measured process: load, two steps, and a JSON line."""
    from bench.models import random_rows
    from horizon_server.engine.device import TORCH_DTYPE, device_for
    from horizon_server.engine.template import Template
    from horizon_server.engine.trainer import Trainer
    from horizon_server.store.host_store import HostStore
    from horizon_server.store.model_load import load_model

    template = Template.from_folder(folder, layout=open_for_training(folder, TrainSpec(optimizer_states=states)).layout)
    store = HostStore.allocate(template.layout, grad_dtype=TORCH_DTYPE[compute_dtype] if clip else None)
    started_s = time.perf_counter()
    load_model(store, folder)
    load_s = time.perf_counter() - started_s
    loaded_bytes = _peak_bytes()
    device = device_for("host", compute_dtype=compute_dtype, num_threads=num_threads)
    recipe = Recipe(learning_rate=1e-5, max_grad_norm=1.0 if clip else None)
    trainer = Trainer(template, store, device, recipe, Execution(optimizer_threads=num_threads), num_steps=2)
    for _ in range(2):
        trainer.train_step(random_rows(template.vocab_size, num_rows=1, row_tokens=ROW_TOKENS))
    trainer.flush()
    result = {"load_s": load_s, "loaded_bytes": loaded_bytes, "peak_bytes": _peak_bytes(), "store": store.host_bytes()}
    print(json.dumps(result))
    trainer.close()
    device.close()
    store.close()


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _read_seconds(folder: Path) -> float:
    """Plain reading of the weights from the page cache, in pieces of 16 MiB."""
    times = []
    for _ in range(3):
        started_s = time.perf_counter()
        for file in folder.glob("*.safetensors"):
            with file.open("rb", buffering=0) as stream:
                buffer = bytearray(16 << 20)
                while stream.readinto(buffer):
                    pass
        times.append(time.perf_counter() - started_s)
    return min(times)


def main() -> None:
    """Print a line per setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, nargs="*", default=["40m", "0.6b"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the computation")
    parser.add_argument("--states", choices=["exact", "compressed"], default="exact", help="of the optimizer")
    parser.add_argument("--measured", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--no-clip", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measured is not None:
        clip, dtype = not arguments.no_clip, arguments.dtype
        states = arguments.states
        train(arguments.measured, clip=clip, num_threads=arguments.threads, compute_dtype=dtype, states=states)
        return
    columns = (
        "shape",
        "clipping",
        "store B/param",
        "planned peak",
        "measured peak",
        "planned / measured",
        "peak in load",
    )
    print(f"| {' | '.join((*columns, 'load speed / plain read speed'))} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for shape in arguments.shape:
        with tempfile.TemporaryDirectory() as name:
            # In a process of its own, so that the measured one finds the memory free.
            code = "import sys, pathlib, bench.host_memory as b; b.write_model(pathlib.Path(sys.argv[1]), sys.argv[2])"
            subprocess.run([sys.executable, "-c", code, name, shape], check=True, env=child_environment())
            for clip in (True, False):
                _print_line(
                    Path(name) / "model",
                    shape,
                    clip=clip,
                    num_threads=arguments.threads,
                    dtype=arguments.dtype,
                    states=arguments.states,
                )


def _print_line(
    folder: Path, shape: str, *, clip: bool, num_threads: int, dtype: ComputeDtype, states: OptimizerStates
) -> None:
    found = open_for_training(folder, TrainSpec(optimizer_states=states))
    recipe = Recipe(learning_rate=1e-5, tokens_per_step=ROW_TOKENS, sequence_length=ROW_TOKENS)
    grad_bytes = ELEMENT_BYTES[dtype] if clip else 0
    plan = plan_memory(found, recipe, Execution(compute_dtype=dtype, grad_bytes=grad_bytes, num_threads=num_threads))
    flags = ["--measured", str(folder), "--threads", str(num_threads), "--dtype", dtype, "--states", states]
    flags += [] if clip else ["--no-clip"]
    read_s = _read_seconds(folder)
    command = [sys.executable, "-m", "bench.host_memory", *flags]
    done = subprocess.run(
        command, check=True, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    measured = json.loads(done.stdout)
    planned = plan.host_total_bytes
    per_parameter = sum(measured["store"].values()) / found.layout.num_parameters
    print(
        f"| {shape} | {'on' if clip else 'off'} | {per_parameter:.2f} | {planned / 2**20:,.0f} MiB "
        f"| {measured['peak_bytes'] / 2**20:,.0f} MiB | {planned / measured['peak_bytes']:.3f} "
        f"| {measured['loaded_bytes'] / 2**20:,.0f} MiB | {read_s / measured['load_s']:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
