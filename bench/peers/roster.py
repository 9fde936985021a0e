"""Who takes part: in which contest, from which module and environment, on which devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Contest = Literal["full", "lora", "dpo"]
OURS = "ours"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One that takes turns. `name` is what its module is started with; `environment` is a requirements file's."""

    name: str
    title: str
    contest: Contest
    module: str
    environment: str
    devices: tuple[str, ...] = ("cpu", "cuda")


PEERS = (
    Peer(name="plain", title="plain PyTorch", contest="full", module="plain", environment="huggingface"),
    Peer(
        name="compiled",
        title="plain PyTorch, torch.compile",
        contest="full",
        module="plain",
        environment="huggingface",
    ),
    Peer(name="trainer", title="Hugging Face Trainer", contest="full", module="huggingface", environment="huggingface"),
    Peer(name="sft", title="TRL SFTTrainer", contest="full", module="huggingface", environment="huggingface"),
    Peer(name="fsdp2", title="FSDP2, CPUOffloadPolicy", contest="full", module="fsdp", environment="huggingface"),
    Peer(
        name="zero3",
        title="DeepSpeed ZeRO-3, offload to the CPU",
        contest="full",
        module="deepspeed",
        environment="deepspeed",
    ),
    Peer(
        name="infinity",
        title="DeepSpeed ZeRO-Infinity, offload to a disk",
        contest="full",
        module="deepspeed",
        environment="deepspeed",
        devices=("cuda",),
    ),
    Peer(
        name="adamw8bit",
        title="torchao AdamW8bit, CPU offload",
        contest="full",
        module="low_bit",
        environment="gpu",
        devices=("cuda",),
    ),
    Peer(name="peft", title="PEFT LoRA", contest="lora", module="plain", environment="huggingface"),
    Peer(
        name="peft-compiled",
        title="PEFT LoRA, torch.compile",
        contest="lora",
        module="plain",
        environment="huggingface",
    ),
    Peer(
        name="qlora",
        title="TRL SFTTrainer, QLoRA (nf4)",
        contest="lora",
        module="huggingface",
        environment="gpu",
        devices=("cuda",),
    ),
    Peer(name="dpo", title="TRL DPOTrainer", contest="dpo", module="huggingface", environment="huggingface"),
)
