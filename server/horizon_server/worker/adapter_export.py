"""What the checkpoints of a job that trains adapters say of them, and of the frozen model that they are for."""

from __future__ import annotations

from functools import cache

from horizon_server.engine.template import Template
from horizon_server.spec import LORA
from horizon_server.store.adapter_files import AdapterConfig
from horizon_server.store.adapters import TRANSPOSED
from horizon_server.store.checkpoint import AdapterExport
from horizon_server.worker_link.request import WorkerRequest


def adapter_export(request: WorkerRequest, template: Template) -> AdapterExport | None:
    """How the adapters of a job are written; None where it trains none."""
    spec, lora = request.spec, request.spec.train.lora
    if spec.train.trainable != LORA:
        return None
    config = AdapterConfig(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        rslora=lora.rslora,
        dora=lora.dora,
        transposed=template.config.get_text_config().model_type in TRANSPOSED,
        base=spec.model,
    )
    # A folder of a base class names its tensors without the first part of the names in the whole model, which PEFT
    # uses.
    in_class, in_folder = template.embedding_parameter, template.embedding_name
    return AdapterExport(
        config=config,
        base_sha256=cache(request.model_digest),
        module_prefix=in_class.removesuffix(in_folder) if in_class.endswith(in_folder) else "",
        export=spec.checkpoint.export,
        merge_base=spec.checkpoint.merge_base,
    )
