"""How ranks part: in processes of their own, because a connection closes when its process ends."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

from horizon_server.engine.ranks import Meeting, Ranks
from horizon_server.records.execution import Execution


def _take_part(rank: int, folder: Path) -> None:
    execution = Execution(device_kind="host", num_ranks=3, lanes=4)
    ranks = Ranks.join(rank, Meeting(file=folder / "meeting"), execution, shared_fd=-1)
    if rank == 0:
        time.sleep(1.0)
        (folder / "done").touch()
    ranks.leave()
    # At once, as the process of a rank ends.
    os._exit(0 if (folder / "done").exists() else 1)


def test_no_rank_closes_its_connections_before_the_first_one_is_done(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_take_part, args=(rank, tmp_path)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0, 0]
