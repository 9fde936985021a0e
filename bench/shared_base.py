"""What ten adapter sessions on one frozen base take of the node's memory, beside their plans and beside ten bases.

Memory files are counted by their proportional share (PSS), over all workers: what is in memory once counts once.

python -m bench.shared_base           # some minutes on two cores, 8 GiB
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tests.support.daemon_process import DaemonProcess
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from horizon_server.demo.recipe import write_demo_model

_LENGTH = 32
_PLANES = ("weights", "moments", "gradients")
_MIB = 1 << 20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, number = Path(name), arguments.sessions
        model = _write_model(folder, arguments.layers)
        daemon = DaemonProcess(
            folder / "state", max_resident_jobs=number, max_loading_jobs=2, max_loading_jobs_of_user=2
        )
        stack.callback(daemon.close)
        daemon.start()
        client = stack.enter_context(daemon.client(daemon.user("ada")))
        client.models.push(model, name="bench")
        lora = {"rank": 8, "alpha": 16}
        options: dict[str, Any] = {"lora": lora, "max_tokens": _LENGTH, "max_tokens_per_call": 4 * _LENGTH}
        sessions = [stack.enter_context(client.session("bench", **options)) for _ in range(number)]
        rows = torch.randint(3, 250, (4, _LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
        for session in sessions:
            session.forward_backward([{"tokens": row} for row in rows])
            session.optim_step(1e-4)
        for session in sessions:
            session.forward([{"tokens": rows[0]}]).result()
        plans = [plan for s in sessions if (plan := client.jobs.get(s.job.job_id).plan) is not None]
        promised = client.node.status().host_memory_promised_bytes
        files, whole = Counter[str](), 0
        for pid in daemon.worker_pids():
            of_worker, all_of_it = _memory(pid)
            files += of_worker
            whole += all_of_it
    base = plans[0].host_bytes["base"]
    adapters = sum(plan.host_bytes[part] for plan in plans for part in _PLANES)
    bases = sum(plan.host_bytes["base"] for plan in plans)
    measured = {"base": files["base"], "adapters": sum(files.values()) - files["base"]}
    print("| what | planned MiB | measured MiB | planned over measured |")
    print("| --- | --- | --- | --- |")
    for what, planned_bytes, measured_bytes in (
        ("the base, once", base, measured["base"]),
        (f"planes of {number} adapters", adapters, measured["adapters"]),
        ("base and adapters", base + adapters, sum(measured.values())),
        (f"all of {number} workers", promised, whole),
    ):
        ratio = f"{planned_bytes / measured_bytes:.3f}"
        print(f"| {what} | {planned_bytes / _MIB:,.1f} | {measured_bytes / _MIB:,.1f} | {ratio} |")
    print(f"\nwith a base for each: {(bases + adapters) / _MIB:,.1f} MiB planned for base and adapters, ", end="")
    print(f"{(bases + adapters) / sum(measured.values()):.2f} times what is measured")


def _write_model(folder: Path, num_layers: int) -> Path:
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(write_demo_model(folder / "demo"))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=True,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def _memory(pid: int) -> tuple[Counter[str], int]:
    """The proportional share that a process has of the daemon's memory files, by their names, and of all memory."""
    files, whole, name = Counter[str](), 0, ""
    for line in Path(f"/proc/{pid}/smaps").read_text("utf-8").splitlines():
        key, _, rest = line.partition(" ")
        if "-" in key and not key.endswith(":"):
            name = rest.rpartition("/memfd:horizon-")[2].partition(" ")[0] if "/memfd:horizon-" in rest else ""
        elif key == "Pss:":
            num_bytes = int(rest.split()[0]) * 1024
            whole += num_bytes
            if name:
                files[name] += num_bytes
    return files, whole


if __name__ == "__main__":
    main()
