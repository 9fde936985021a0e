"""The child that measures this machine: `python -m horizon_server.worker.rates`. Its answer is the rates of one device.

A process of its own, because it loads torch: `horizond doctor` and the daemon start it.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from horizon_server.children.entry import EventWriter, serve


def work(request: Any, _: EventWriter) -> dict[str, Any]:
    """Measure the device that the request names, `host` or `cuda`, with that many threads."""
    from horizon_server.engine.rate_probe import measure_rates

    return dataclasses.asdict(measure_rates(request["device"], num_threads=request["num_threads"]))


if __name__ == "__main__":
    sys.exit(serve(work, who="the measurement"))
