"""The worker's entry: `python -m horizon_server.worker REQUEST --events-fd N`. Says how it ended, always, in its last event.

Nothing here is meant to be typed by hand, but it can be: the request file beside an attempt's log is all it needs besides descriptors.
"""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from pathlib import Path

from horizon_server.children.entry import EventWriter, Orders
from horizon_server.errors import HorizonError
from horizon_server.events import AttemptEnded
from horizon_server.worker.request import read_request


def main() -> int:
    """Run one attempt; exit code 0 when it succeeded or was stopped by an order."""
    parser = argparse.ArgumentParser(prog="python -m horizon_server.worker", description=__doc__)
    parser.add_argument("request", type=Path, help="the request file of the attempt")
    parser.add_argument("--events-fd", type=int, required=True, help="descriptor that events are written to")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    events = EventWriter(arguments.events_fd)
    try:
        ended = _run(arguments.request, events)
    except HorizonError as error:
        traceback.print_exc()
        ended = AttemptEnded(outcome="failed", reason=error.reason, message=error.message)
    except MemoryError:
        traceback.print_exc()
        ended = AttemptEnded(outcome="failed", reason="OUT_OF_MEMORY", message="the worker ran out of host memory")
    except Exception as error:  # noqa: BLE001  # the last floor: whatever it is, the daemon is told the true reason
        traceback.print_exc()
        ended = AttemptEnded(outcome="failed", reason="WORKER_FAILED", message=f"{type(error).__name__}: {error}")
    events.send(ended)
    return 1 if ended.outcome == "failed" else 0


def _run(path: Path, events: EventWriter) -> AttemptEnded:
    request = read_request(path)
    orders = Orders()
    # Heavy imports come after the orders are listened to, so that a stop during start-up is heard.
    from horizon_server.worker.training import Training

    training = Training(request, events=events, orders=orders)
    try:
        finished = training.run()
    finally:
        training.close()
    return AttemptEnded(outcome="succeeded" if finished else "stopped")


if __name__ == "__main__":
    sys.exit(main())
