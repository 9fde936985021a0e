"""Whether a job's long rows can be computed in chunks, and which chunks would make it fit. Loads no torch."""

from __future__ import annotations

from horizon_server.errors import InvalidSpec
from horizon_server.planning.layer_probe import is_recurrent
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.spec import JobSpec
from horizon_server.store.model_files import text_config

SUGGESTED_CHUNKS = tuple(1 << power for power in range(16, 9, -1))
"""Chunks that a plan tries where a job does not fit, the largest first: smaller ones take longer."""


def why_no_chunks(folder: ModelFolder, spec: JobSpec) -> str:
    """Return why the model, or the devices, allow no chunks; empty where they do.

    Of the model this is what its files show: the worker tries its layers out as well.
    """
    model_type = text_config(folder.config).get("model_type")
    if is_recurrent(folder.layout):
        return f"the model is of type {model_type}, of which some layers keep a state from token to token"
    if folder.shape.needs_masks:
        return f"the model is of type {model_type}, whose attention takes masks and has no chunks"
    if spec.gpus.most * spec.nodes.most > 1:
        return f"gpus is {spec.gpus.plain}, nodes is {spec.nodes.plain}, and chunks are for one device"
    if spec.memory.experts == "paged":
        return "memory.experts is paged, which goes through a layer for all tokens at once"
    return ""


def check_chunks(folder: ModelFolder, spec: JobSpec) -> None:
    """Raises InvalidSpec where the spec asks for chunks that are not allowed."""
    if spec.train.chunk_tokens is not None and (problem := why_no_chunks(folder, spec)):
        what = f"train.chunk_tokens is {spec.train.chunk_tokens} and {problem}; leave train.chunk_tokens out"
        raise InvalidSpec.of("train.chunk_tokens", what)
