"""What a job's spec alone decides of its execution, on whatever devices. Loads no torch."""

from __future__ import annotations

import dataclasses

from horizon_server.errors import InvalidSpec
from horizon_server.records.execution import ELEMENT_BYTES, ComputeDtype, Execution
from horizon_server.spec import JobSpec
from horizon_server.store.pages import MOST_PAGE_ELEMENTS

# Of a step that several devices compute: the same on 2, 4 and 8 of them, so that the result is.
_DEFAULT_LANES = 8


def with_spec(execution: Execution, spec: JobSpec) -> Execution:
    """The same execution, of a job with this spec. Raises InvalidSpec where a device would have no lane."""
    return dataclasses.replace(
        execution,
        wire=spec.train.wire,
        lanes=lanes_of(spec),
        grad_bytes=_grad_bytes(spec, execution.compute_dtype),
        adds_up=spec.is_session,
        expert_page_elements=page_elements_of(spec),
        chunk_tokens=spec.train.chunk_tokens or 0,
    )


def page_elements_of(spec: JobSpec) -> int:
    """The most elements of a page of experts, of training and of answers; 0 where layers are whole."""
    return MOST_PAGE_ELEMENTS if spec.memory.experts == "paged" else 0


def lanes_of(spec: JobSpec) -> int:
    """The parts that a step is divided into, on whatever number of nodes and devices. Raises InvalidSpec where a device
    would have none."""
    most = spec.nodes.most * spec.gpus.most
    lanes, gpus, least = spec.train.lanes, spec.gpus, 1 << (most - 1).bit_length()
    if lanes is None:
        return 1 if most == 1 else max(_DEFAULT_LANES, least)
    if lanes < most:
        of_nodes = f" on {spec.nodes.plain} nodes" if spec.nodes.most > 1 else ""
        instead = f" or gpus: {gpus.at_most(lanes).plain}" if spec.nodes.most == 1 else ""
        what = (
            f"train.lanes is {lanes} and gpus is {gpus.plain}{of_nodes}, and each device computes one lane at least; "
            f"use train.lanes: {least}{instead}"
        )
        raise InvalidSpec.of("train.lanes", what)
    return lanes


def _grad_bytes(spec: JobSpec, compute_dtype: ComputeDtype) -> int:
    """Of one stored gradient; none is stored where no clipping waits for the norm. Those of a session's calls add up,
    which bf16 does not survive."""
    if spec.is_session:
        return ELEMENT_BYTES["float32"]
    return 0 if spec.train.max_grad_norm is None else ELEMENT_BYTES[compute_dtype]
