"""The entry that counts what a model's layers keep: `python -m horizon_server.worker.layer_memory FOLDER`. Prints JSON.

A process of its own, because it loads torch: the daemon's plan reads what it prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
from pathlib import Path

from horizon_server.errors import HorizonError
from horizon_server.planning.machine import host_memory


def main() -> int:
    """Count and print."""
    parser = argparse.ArgumentParser(prog="python -m horizon_server.worker.layer_memory", description=__doc__)
    parser.add_argument("folder", type=Path, help="model folder")
    arguments = parser.parse_args()
    # A model that takes more for one row of one layer is planned by formula; the machine's jobs must not pay for the question.
    limit_bytes = host_memory().available_bytes // 2
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    from horizon_server.engine.layer_memory import measure_layer_memory

    try:
        json.dump(dataclasses.asdict(measure_layer_memory(arguments.folder)), sys.stdout)
    except HorizonError as error:
        print(error.message, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
