"""What a job asks for that cannot be done, or is likely not meant, although nothing refuses it. Torch-free.

Each warning is one sentence, which names the field and what to write instead; `job plan`, `queue simulate` and `job
submit` show the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from horizon_server.planning.lora import left_out
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.records.execution import Execution
from horizon_server.spec import LORA, JobSpec
from horizon_server.store.layout import StoreLayout
from horizon_server.texts import size_text

# Whole models are trained at 1e-6 to 1e-4, adapters at 1e-4 to 1e-3, tiny models from nothing at up to 1e-2.
_MOST_LEARNING_RATE = 0.02

# Of a parameter in a trainer that keeps everything on its GPUs. Trained: the fp32 master and two fp32 moments, with a
# bf16 weight and a bf16 gradient, or with an fp32 gradient. Frozen: the bf16 weight.
_TRAINED_BYTES, _FROZEN_BYTES = 16, 2
# Of each GPU's memory, up to which these count as fitting: activations, logits and the layers that are gathered take
# the rest, by settings of the other trainer that this planner does not know.
_STATE_SHARE = 0.7


def spec_warnings(spec: JobSpec, found: ModelFolder, *, num_steps: int | None, estimated: bool) -> list[str]:
    """Return the warnings of a job of this model. `num_steps` are the whole job's where known, by estimate where
    `estimated`."""
    return [
        *_of_the_schedule(spec, num_steps, estimated=estimated),
        *_of_adapters(spec, found),
        *_of_evaluations(spec, found),
    ]


def of_lanes(spec: JobSpec, execution: Execution) -> list[str]:
    """Return what slows down a step that is divided among lanes or devices."""
    if execution.lanes == 1:
        return []
    tokens, of_lane = spec.train.tokens_per_step, spec.train.tokens_per_step // execution.lanes
    if execution.num_ranks > 1 and spec.train.sequence_length * execution.num_ranks > tokens:
        return [
            f"train.tokens_per_step is {tokens} for {execution.num_ranks} devices, and a row may have "
            f"train.sequence_length, {spec.train.sequence_length}: a row is not divided, so some devices may wait for "
            "others; use a larger train.tokens_per_step"
        ]
    if 0 < of_lane < execution.micro_batch_tokens:
        return [
            f"each of train.lanes {execution.lanes} has about {of_lane} tokens of a step, fewer than the "
            f"{execution.micro_batch_tokens} that are computed at once where there are as many; use a larger "
            "train.tokens_per_step or fewer lanes"
        ]
    return []


def _of_the_schedule(spec: JobSpec, num_steps: int | None, *, estimated: bool) -> Iterator[str]:
    train = spec.train
    if train.learning_rate > _MOST_LEARNING_RATE:
        yield (
            f"train.learning_rate is {train.learning_rate:g}, far above what AdamW trains language models with (1e-6 "
            "to 1e-3): the loss "
            "will most likely not fall; write for example 1.0e-5, or 2.0e-4 with train.trainable: lora"
        )
    # The schedule is that of all steps, whatever limits ends the job earlier.
    steps = train.max_steps if train.max_steps is not None else num_steps
    if steps is not None and train.warmup_steps >= steps:
        of_job = f"train.max_steps is {steps}"
        if train.max_steps is None:
            of_job = f"the job has {'about ' if estimated else ''}{steps} steps"
        yield (
            f"train.warmup_steps is {train.warmup_steps} and {of_job}, so the learning rate never reaches "
            f"train.learning_rate; use a train.warmup_steps well below {steps}"
        )


def _of_adapters(spec: JobSpec, found: ModelFolder) -> Iterator[str]:
    if spec.train.trainable != LORA:
        return
    if experts := left_out(found.layout, spec.train.lora):
        yield experts
    rank, shapes = spec.train.lora.rank, {name: header.shape for name, header in found.headers.items()}
    adapted = {tensor.adapts for _, tensor in found.layout.tensors() if tensor.adapts}
    small = sorted((min(shapes[name]), name) for name in adapted if name in shapes and min(shapes[name]) < rank)
    if small:
        side, name = small[0]
        yield (
            f"train.lora.rank is {rank}, and {len(small)} of {len(adapted)} adapted matrices are smaller than that "
            f"({name} is {' by '.join(map(str, shapes[name]))}): what is above {side} takes memory and adds nothing "
            f"there; use a train.lora.rank well below {side}, or train.trainable: all"
        )


def _of_evaluations(spec: JobSpec, found: ModelFolder) -> Iterator[str]:
    if spec.eval_every_steps and not spec.eval_sets:
        yield (
            f"eval_every_steps is {spec.eval_every_steps}, and the job has no eval set, so nothing is evaluated; set "
            "eval_dataset, "
            "eval_fraction or eval.sets"
        )
    generate, positions = spec.eval.generate, found.shape.max_position_embeddings
    if generate is None:
        return
    room = positions - generate.max_new_tokens
    what = f"eval.generate.max_new_tokens is {generate.max_new_tokens}, and the model has {positions} positions"
    if room < 1:
        yield f"{what}: no prompt leaves room for an answer, so none is asked; use a value well below {positions}"
    elif room < spec.train.sequence_length - 1:
        yield f"{what}: prompts of more than {room} tokens are left out; lower it where your prompts are longer"


def keeping_everything(layout: StoreLayout, execution: Execution) -> str:
    """Return the hint that a job's several GPUs have the memory for all that it streams to them; empty where they have
    not."""
    num_gpus, of_each = execution.num_ranks, execution.device_limit_bytes
    if num_gpus == 1:
        return ""
    num_trained = layout.num_trained_parameters
    num_frozen = sum(t.num_elements for _, t in layout.tensors() if not t.trained and t.packing == "none")
    state_bytes = _TRAINED_BYTES * num_trained + _FROZEN_BYTES * num_frozen + sum(u.packed_bytes for u in layout.units)
    if state_bytes > _STATE_SHARE * of_each * num_gpus:
        return ""
    return (
        f"all {size_text(state_bytes)} of the job's weights, gradients and moments would fit in the "
        f"{size_text(of_each * num_gpus)} that it may use of {num_gpus} GPUs: FSDP2, as in torchtitan, Axolotl or TRL, "
        "keeps them there and is likely to be faster for this job"
    )
