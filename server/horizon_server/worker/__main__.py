"""The worker's entry: `python -m horizon_server.worker REQUEST --events-fd N`, see `children.entry`.

Nothing here is meant to be typed by hand, but it can be: the request file next to an attempt's log holds all it needs but the descriptors.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from horizon_server.children.entry import EventWriter, Orders, serve
from horizon_server.worker import let_launchers_run


def work(request: Any, events: EventWriter) -> str:
    """Run one attempt; returns `succeeded`, or `stopped` where an order came first."""
    let_launchers_run()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    orders = Orders()
    # Heavy imports come after the orders are listened to, so that a stop during start-up is heard.
    from horizon_server.worker.training import Training, WorkerRequest

    training = Training(WorkerRequest.from_mapping(request), events=events, orders=orders)
    try:
        finished = training.run()
    except BaseException:
        try:
            training.close()
        except Exception:  # the daemon is sent the first error, which this one follows from
            logging.exception("closing failed too")
        raise
    training.close()
    return "succeeded" if finished else "stopped"


if __name__ == "__main__":
    sys.exit(serve(work, who="the worker", outlives_daemon=True))
