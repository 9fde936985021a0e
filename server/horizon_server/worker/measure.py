"""The child that measures for the plan, started by the daemon and the admin's commands: `python -m
horizon_server.worker.measure`.

A process of its own, because it loads torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from horizon_server.children.entry import EventWriter, serve
from horizon_server.codec import to_plain
from horizon_server.errors import naming
from horizon_server.imports import seldom_collecting
from horizon_server.worker import let_launchers_run


def work(request: Any, _: EventWriter) -> Any:
    """Return the rates of a device, in a compute dtype and with a number of threads; what the layers of a model folder
    keep; the tensors that its config.json alone asks for; nothing of a folder whose model can be trained, which raises
    InvalidModel otherwise; the UUIDs of the GPUs; what several devices do at once; or whether the first GPU computes,
    which raises otherwise.
    """
    let_launchers_run()
    if "layers_of" in request:
        with seldom_collecting():
            from horizon_server.engine.layer_memory import measure_layer_memory

        return to_plain(measure_layer_memory(Path(request["layers_of"])))
    if "tensors_of" in request:
        with seldom_collecting():
            from horizon_server.engine.meta_model import tensors_of_config

        folder = Path(request["tensors_of"])
        with naming({folder: ""}):
            return tensors_of_config(folder)
    if "try" in request:
        return _tried(Path(request["try"]))
    if "gpus" in request:
        return _gpus()
    if "peers" in request:
        from horizon_server.worker.peer_probe import measure_peers

        return to_plain(measure_peers(request["peers"], _gpus(), request["num_devices"]))
    if "computes" in request:
        return _computes()
    with seldom_collecting():
        from horizon_server.engine.rate_probe import measure_rates

    rates = measure_rates(request["device"], compute_dtype=request["compute_dtype"], num_threads=request["num_threads"])
    return to_plain(rates)


def _gpus() -> list[str]:
    """The UUIDs of the devices in torch's order, which need not be the driver's; "" for one that torch names none
    of."""
    import torch

    if not torch.cuda.is_available():
        return []
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [str(getattr(device, "uuid", "")) for device in devices]


def _computes() -> bool:
    import torch

    ones = torch.ones(256, 256, device="cuda")
    return float((ones @ ones).sum().item()) == 256.0**3


def _tried(folder: Path) -> dict[str, Any]:
    with seldom_collecting():
        from horizon_server.engine.template import Template

    # Where the folder is on the node is not the caller's concern.
    with naming({folder: ""}):
        Template.from_folder(folder)
    return {}


if __name__ == "__main__":
    sys.exit(serve(work, who="the measurement"))
