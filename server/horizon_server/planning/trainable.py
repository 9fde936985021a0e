"""What of a model a job trains: its folder, with the store laid out for that, the same for the plan and for the worker.
Torch-free."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from horizon_server.expressions import chosen_names
from horizon_server.planning.lora import with_lora
from horizon_server.planning.lr_groups import with_lr_groups
from horizon_server.planning.model_folder import ModelFolder, open_model_folder
from horizon_server.records.plan import SharedBase
from horizon_server.spec import EVERYTHING, LORA, JobSpec, TrainSpec
from horizon_server.store.base_plane import base_key, can_be_shared, file_bytes
from horizon_server.store.layout import with_compressed_states, with_decay, with_trained


def open_for_training(folder: Path, train: TrainSpec) -> ModelFolder:
    """Open a model folder, laid out for a job: what is frozen has no moments and no gradient, and no `lo` half where it
    is in bfloat16; states are compressed where the job says so, but for tensors that are computed with in fp32.

    Raises:
        InvalidModel: the folder cannot be trained from.
        InvalidSpec: an expression of `train.trainable`, `train.lora.targets` or `train.lr_groups` fits no tensor or
            changes nothing, or nothing is trained.
    """
    found = open_model_folder(folder)
    layout = with_decay(found.layout, train.decay)
    if train.trainable == LORA:
        layout = with_lora(found, layout, train)
    elif train.trainable != EVERYTHING:
        names = [tensor.name for _, tensor in layout.tensors()]
        trained = chosen_names("train.trainable", train.trainable, names, to="train")
        layout = with_trained(layout, trained.__contains__, is_bfloat16=found.is_bfloat16)
    if train.optimizer_states == "compressed":
        in_fp32 = found.shape.kept_in_fp32
        layout = with_compressed_states(layout, is_exact=lambda name: any(re.search(part, name) for part in in_fp32))
    return dataclasses.replace(found, layout=with_lr_groups(layout, train.lr_groups))


def shared_base(folder: ModelFolder, spec: JobSpec) -> SharedBase | None:
    """Return the frozen weights that a job shares with others of its node; `folder` is laid out for it. None where it
    has none, and where nodes divide them. Raises InvalidModel: the folder cannot be read."""
    if spec.nodes.most > 1 or not can_be_shared(folder.layout):
        return None
    return SharedBase(key=base_key(folder.path, folder.layout), num_bytes=file_bytes(folder.layout))
