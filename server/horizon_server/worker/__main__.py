"""The worker's entry: `python -m horizon_server.worker REQUEST`, see `worker_link.worker_end`."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from horizon_server import cpu_priority
from horizon_server.codec import from_plain
from horizon_server.imports import seldom_collecting
from horizon_server.worker import let_launchers_run
from horizon_server.worker.rank_processes import OtherRanks
from horizon_server.worker_link.request import WorkerRequest
from horizon_server.worker_link.worker_end import WorkerEnd, serve_worker


def _import_libraries() -> None:
    with seldom_collecting():
        for name in ("training", "session"):
            importlib.import_module(f"horizon_server.worker.{name}")


def load(yields: bool) -> None:
    """Load the libraries of a worker that has no attempt yet."""
    if not yields:
        _import_libraries()
        return
    cpu_priority.lower_while_loading()
    cpu_priority.in_lowered_thread(_import_libraries)
    cpu_priority.restore()


def work(request: Any, link: WorkerEnd) -> dict[str, str]:
    """Run one attempt; returns its outcome with a reason and a message, as `Outcome` has them."""
    let_launchers_run()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asked = from_plain(WorkerRequest, request)
    others = None
    if asked.plan.execution.num_ranks > 1:
        # First, so that they load their libraries and lay out the model while this process does.
        others = OtherRanks(asked, link.request_file, alive_fd=link.alive_fd)
    # Heavy imports come after the orders are listened to, so that a stop during start-up is heard.
    if asked.yields_processors:
        # Of the jobs that share the device, those that train come first until this one has its first turn.
        cpu_priority.lower_while_loading()
        cpu_priority.in_lowered_thread(_import_libraries)
    training: Training | Session | None = None
    try:
        _import_libraries()
        from horizon_server.worker.session import Session
        from horizon_server.worker.training import Training

        if asked.spec.is_session:
            training = Session(asked, events=link, orders=link.orders)
        else:
            training = Training(asked, events=link, orders=link.orders, others=others)
        outcome = training.run()
    except BaseException as error:
        cause = error if others is None else others.cause_of(error)
        if others is not None:
            # What waits for them here fails, so that nothing is waited for while this rank closes.
            others.kill()
        try:
            if training is not None:
                training.close()
        except Exception:  # the daemon is sent the first error, which this one follows from
            logging.exception("closing failed too")
        if cause is not error:
            raise cause from error
        raise
    training.close()
    return dict(vars(outcome))


if __name__ == "__main__":
    serve_worker(work, who="the worker", load=load)
