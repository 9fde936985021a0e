"""The child that measures for the plan, started by the daemon and the admin's commands: `python -m horizon_server.worker.measure`.

A process of its own, because it loads torch.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from horizon_server.children.entry import EventWriter, serve
from horizon_server.worker import let_launchers_run


def work(request: Any, _: EventWriter) -> dict[str, Any]:
    """Return the rates of a device, in a compute dtype and with a number of threads; or what the layers of a model folder keep."""
    let_launchers_run()
    if "layers_of" in request:
        from horizon_server.engine.layer_memory import measure_layer_memory

        return dataclasses.asdict(measure_layer_memory(Path(request["layers_of"])))
    from horizon_server.engine.rate_probe import measure_rates

    rates = measure_rates(request["device"], compute_dtype=request["compute_dtype"], num_threads=request["num_threads"])
    return dataclasses.asdict(rates)


if __name__ == "__main__":
    sys.exit(serve(work, who="the measurement"))
