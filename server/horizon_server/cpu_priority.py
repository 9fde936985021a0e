"""How much of the processors a process gets beside others: little while a job is being loaded, so that those that train
keep theirs.

Without privileges a process may raise its nice value, and not lower it again. Two other things can be taken back: the
weight of a control group, where the node gives each worker one, and the nice value of a session, by which the kernel
divides the processors where it groups processes by session (`kernel.sched_autogroup_enabled`) and no control group
does. Where the node has neither, only what is lowered for good is lowered: processes that end when the loading does,
and the thread that imports the libraries.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from horizon_server.control_groups import own_worker_group

Result = TypeVar("Result")

LOADING_NICE = 15
"""While loading: a thirtieth of what a process gets that trains. Where processors are idle it gets them all the
same."""
# What that nice value is among the weights of control groups, of which the usual one is 100.
_LOADING_WEIGHT, _USUAL_WEIGHT = 4, 100

_SESSION = Path("/proc/self/autogroup")
# The kernel takes ten such changes a second of all unprivileged processes together.
_TRY_FOR_S, _TRY_EVERY_S = 1.0, 0.05


def lower_while_loading() -> None:
    """Give this process, which has a session of its own, little of the processors until `restore`."""
    _set(LOADING_NICE, _LOADING_WEIGHT)


def lower_for_good() -> None:
    """Give this process, with all that it starts, little of the processors until its end."""
    _set_session(LOADING_NICE)
    os.setpriority(os.PRIO_PROCESS, 0, max(LOADING_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def use_idle_processors() -> None:
    """Give this process, with all that it starts, only what every other process leaves of the processors, until its
    end."""
    lower_for_good()
    with contextlib.suppress(OSError):  # a sandbox that forbids it; it has little of them all the same
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def restore() -> bool:
    """Give this process its usual part again; return whether that has worked. It may be called again."""
    return _set(0, _USUAL_WEIGHT)


def in_lowered_thread(call: Callable[[], Result]) -> Result:
    """Return what `call` gives, carried out in a thread that gets little of the processors. Threads that it starts get
    no more."""
    found: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        # On Linux the nice value is a thread's own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOADING_NICE)
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001  # raised again by the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="lowered")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _set(nice: int, weight: int) -> bool:
    group = own_worker_group()
    # Groups have no weight where the unit passes on memory alone: nothing was lowered there.
    has_weight = group is not None and (group.path / "cpu.weight").exists()
    refused = group is not None and has_weight and group.set_cpu_weight(weight) is not None
    return _set_session(nice) and not refused


def _set_session(nice: int) -> bool:
    """Set the nice value of the own session; return whether it is set, or there is none to set."""
    # A worker that is started by hand is in the session of a terminal, whose other processes are none of its business.
    if os.getsid(0) != os.getpid() or not _SESSION.exists():
        return True
    end_s = time.monotonic() + _TRY_FOR_S
    while True:
        try:
            _SESSION.write_text(str(nice), "utf-8")
        except BlockingIOError:
            if time.monotonic() > end_s:
                return False
            time.sleep(_TRY_EVERY_S)
        except OSError:  # the kernel groups nothing by session
            return True
        else:
            return True
