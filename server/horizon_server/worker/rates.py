"""The entry that measures this machine: `python -m horizon_server.worker.rates host`. Prints the rates of one device as JSON.

A process of its own, because it loads torch: `horizond doctor` and the daemon read what it prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from horizon_server.store.cpus import available_cpus


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m horizon_server.worker.rates", description=__doc__)
    parser.add_argument("device", choices=["host", "cuda"], help="what to measure")
    parser.add_argument("--threads", type=int, default=available_cpus(), help="threads of a worker")
    parser.add_argument("--budget-s", type=float, default=10.0, help="seconds after which no further width is timed")
    arguments = parser.parse_args()
    from horizon_server.engine.rate_probe import measure_rates

    rates = measure_rates(arguments.device, num_threads=arguments.threads, budget_s=arguments.budget_s)
    json.dump(dataclasses.asdict(rates), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
