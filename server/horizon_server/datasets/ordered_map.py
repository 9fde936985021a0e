"""A function over many items in several processes, the results in the order of the items.

Owns the processes. Must not know what the function does.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from horizon_server.children.entry import end_with_parent
from horizon_server.errors import WorkerDied

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD_PER_PROCESS = 2
"""So many items of each process are read ahead: none of them waits, and memory stays bounded."""

_function: Callable[[Any], Any] | None = None


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], *, num_processes: int) -> Iterator[Result]:
    """Yield `function(item)` for each item in order; one process is the caller's own.

    The others are forked, so that they share what the function has loaded. Raises: WorkerDied when one of them is killed.
    Thread: to be called while this is the only one.
    """
    if num_processes == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=_adopt, initargs=(function,))
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(_apply, item))
            if len(pending) > _AHEAD_PER_PROCESS * num_processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise WorkerDied(
            "a process of the data preparation was killed, by hand or by the kernel for lack of memory"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _adopt(function: Callable[[Any], Any]) -> None:
    # A pool hands its workers nothing but what is global to them.
    global _function
    _function = function
    # The parent ends its processes; its own handler would run in them with its cleanup.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Where the parent is killed, nobody else ends them.
    end_with_parent()


def _apply(item: Any) -> Any:
    assert _function is not None, "the pool's initializer has run"
    return _function(item)
