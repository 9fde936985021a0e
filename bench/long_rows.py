"""Host memory against the plan at long rows, family by family: where attention is not fused, or a layer scans, it
decides on the plan.

A small model of each family is written with random weights; a process of its own loads it, trains two steps of one row,
and reports its peak RSS. The daemon's own planning, with its count of recurrent layers, gives the plan.

python -m bench.long_rows                          # all families, about half an hour on two cores
python -m bench.long_rows llama4_text --packed     # a row of four documents
python -m bench.long_rows qwen3 --row 16384 --chunk 2048    # in chunks
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horizon_server.planning.layer_probe import LayerProbe
from horizon_server.planning.ledger import micro_batch_tokens, plan_memory
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution
from horizon_server.records.plan import Ledger
from horizon_server.settings import child_environment

NUM_THREADS = 2
VOCAB = 1024
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_SIZES = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "pad_token_id": 7}
_GPT = {
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 128,
    "n_inner": 256,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_GROUPED = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _HEADS,
    "qwen3": _HEADS,
    "gpt2": _GPT,
    "bloom": {"n_layer": 3, "n_head": 4, **_NO_DROPOUT},
    "falcon": {"num_attention_heads": 4, "alibi": False, **_NO_DROPOUT},
    "gpt_neo": {
        "num_hidden_layers": 4,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "embed_dropout": 0.0,
        "attention_dropout": 0.0,
        "resid_dropout": 0.0,
    },
    "gptj": {**_GPT, "rotary_dim": 16},
    "mpt": {"d_model": 128, "n_heads": 4, "n_layers": 3},
    "openai-gpt": _GPT,
    "gpt_oss": {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "doge": _HEADS,
    "mixtral": {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_HEADS, "num_experts": 8, **_MOE},
    "llama4_text": {**_HEADS, "num_local_experts": 4, "intermediate_size_mlp": 256, "num_experts_per_tok": 2},
    "mimo_v2_flash": {**_HEADS, "n_routed_experts": 4, **_MOE},
    "deepseek_v3": {**_LATENT, **_GROUPED, **_MOE},
    "deepseek_v32": {**_LATENT, **_GROUPED, **_MOE, "index_topk": 256, "index_n_heads": 2, "index_head_dim": 32},
    "longcat_flash": {
        **_LATENT,
        "head_dim": 16,
        "num_layers": 2,
        "ffn_hidden_size": 256,
        "expert_ffn_hidden_size": 64,
        "n_routed_experts": 8,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "kimi_linear": {
        **_LATENT,
        **_MOE,
        "q_lora_rank": None,
        "num_local_experts": 4,
        "first_k_dense_replace": 1,
        "linear_head_dim": 32,
        "linear_num_heads": 4,
    },
    "bamba": {**_HEADS, **_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**_HEADS, **_MAMBA2, "mamba_d_ssm": 256},
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 16},
    "qwen3_next": {
        **_HEADS,
        **_MOE,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "shared_expert_intermediate_size": 64,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}


def write_model(folder: Path, family: str, row_tokens: int) -> None:
    """A folder as `save_pretrained` writes it, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    positions = {"max_position_embeddings": row_tokens, "n_positions": row_tokens, "max_seq_len": row_tokens}
    config = AutoConfig.for_model(family, **{**_SIZES, **positions, **FAMILIES[family]})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]


def train(folder: Path, document_lengths: tuple[int, ...], chunk_tokens: int = 0) -> None:
    """The measured process: two steps, and its peak RSS in bytes."""
    account(folder, document_lengths, chunk_tokens)
    status = Path("/proc/self/status").read_text("ascii")
    print(json.dumps(int(status.split("VmHWM:")[1].split()[0]) * 1024))


def execution_of(hidden_size: int, chunk_tokens: int) -> Execution:
    """How the steps run: in chunks with hidden states that come and go."""
    return Execution(
        num_threads=NUM_THREADS,
        optimizer_threads=NUM_THREADS,
        micro_batch_tokens=micro_batch_tokens(hidden_size, "host"),
        chunk_tokens=chunk_tokens,
        activation_placement="host" if chunk_tokens else "device",
    )


def account(folder: Path, document_lengths: tuple[int, ...], chunk_tokens: int = 0) -> Mapping[str, int]:
    """What the device held at its peak in two steps of one row, by component."""
    import torch

    from horizon_server.engine.device.host import HostDevice
    from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
    from horizon_server.engine.template import Template
    from horizon_server.engine.trainer import Trainer
    from horizon_server.store.host_store import HostStore
    from horizon_server.store.model_load import load_model

    template = Template.from_folder(folder)
    store = HostStore.allocate(template.layout, grad_dtype=torch.float32)
    load_model(store, folder)
    execution = execution_of(template.hidden_size, chunk_tokens)
    device = HostDevice(num_threads=NUM_THREADS)
    trainer = Trainer(template, store, device, Recipe(learning_rate=1e-5), execution, num_steps=2)
    ids_T = torch.randint(VOCAB, (sum(document_lengths),))
    starts = torch.tensor(document_lengths).cumsum(0)[:-1]
    labels_T = ids_T.roll(-1)
    labels_T[[*(starts - 1).tolist(), -1]] = IGNORED_LABEL
    row = MicroBatch(
        input_ids_T=ids_T,
        position_ids_T=torch.cat([torch.arange(length) for length in document_lengths]),
        labels_T=labels_T,
        document_lengths=document_lengths,
    )
    for _ in range(2):
        report = trainer.train_step([row])
    trainer.flush()
    trainer.close()
    device.close()
    store.close()
    return report.device_memory_bytes


def planned(folder: Path, lengths: tuple[int, ...], chunk_tokens: int = 0) -> Ledger:
    """The plan of steps of one row of such documents."""
    found = open_model_folder(folder)
    return plan_memory(
        found,
        Recipe(learning_rate=1e-5, tokens_per_step=sum(lengths), sequence_length=sum(lengths)),
        execution_of(found.shape.hidden_size, chunk_tokens),
        layer=LayerProbe(child_environment())(found),
        longest_document=max(lengths),
    )


def planned_bytes(folder: Path, lengths: tuple[int, ...], chunk_tokens: int = 0) -> int:
    """Host memory planned for such steps."""
    return planned(folder, lengths, chunk_tokens).host_total_bytes


def measured_bytes(folder: Path, lengths: tuple[int, ...], chunk_tokens: int = 0) -> int:
    """The peak of a process that takes two such steps."""
    code = (
        "import sys, pathlib, bench.long_rows as b; "
        "b.train(pathlib.Path(sys.argv[1]), tuple(map(int, sys.argv[3:])), int(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(folder), str(chunk_tokens), *map(str, lengths)]
    done = subprocess.run(
        command, check=True, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return int(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print a line per family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "families",
        nargs="*",
        choices=[[], *FAMILIES],
        metavar="NAME",
        help=f"{', '.join(FAMILIES)}; all when none is named",
    )
    parser.add_argument("--row", type=int, default=4096, help="tokens of the row")
    parser.add_argument("--packed", action="store_true", help="four documents in the row")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a chunk; without, rows are computed whole")
    arguments = parser.parse_args()
    print("| family | documents | planned peak | measured peak | measured / planned |\n| --- | --- | --- | --- | --- |")
    lengths = (arguments.row // 4,) * 4 if arguments.packed else (arguments.row,)
    documents = " + ".join(map(str, lengths))
    for family in arguments.families or FAMILIES:
        with tempfile.TemporaryDirectory() as name:
            # In a process of its own, so that the measured one finds the memory free.
            code = (
                "import sys, pathlib, bench.long_rows as b; b.write_model(pathlib.Path(sys.argv[1]), sys.argv[2], "
                "int(sys.argv[3]))"
            )
            command = [sys.executable, "-c", code, name, family, str(arguments.row)]
            subprocess.run(command, check=True, env=child_environment(), stderr=subprocess.DEVNULL)
            folder, chunk = Path(name), arguments.chunk
            plan_bytes, peak = planned_bytes(folder, lengths, chunk), measured_bytes(folder, lengths, chunk)
        sizes = f"{plan_bytes / 2**20:,.0f} MiB | {peak / 2**20:,.0f} MiB"
        print(f"| {family} | {documents} | {sizes} | {peak / plan_bytes:.2f} |", flush=True)


if __name__ == "__main__":
    main()
