"""Ranks of one machine end together, and the one that ended first is told of."""

from __future__ import annotations

import json
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from horizon_server.children.entry import Answer, Failure
from horizon_server.nodes.processes import End, RankProcesses

WAIT_S = 240.0
Start = Callable[..., RankProcesses]


@pytest.fixture
def told() -> queue.Queue[tuple[str, End]]:
    """Which ranks were told of, and how they ended."""
    return queue.Queue()


@pytest.fixture
def start(told: queue.Queue[tuple[str, End]], tmp_path: Path) -> Iterator[Start]:
    """Starts ranks from 1 up, each with what it does."""
    started: list[RankProcesses] = []

    def begin(*what: str) -> RankProcesses:
        request = tmp_path / "request.json"
        request.write_text(json.dumps({str(rank): does for rank, does in enumerate(what, start=1)}))
        ranks = RankProcesses(
            range(1, len(what) + 1),
            request,
            meeting=(),
            planes={},
            on_end=lambda who, end: told.put((who, end)),
            module="tests.support.scripted_rank",
        )
        started.append(ranks)
        return ranks

    yield begin
    for ranks in started:
        ranks.kill()


def ended(ranks: RankProcesses) -> bool:
    """Wait for all of them."""
    end_s = time.monotonic() + WAIT_S
    while ranks.are_alive and time.monotonic() < end_s:
        time.sleep(0.02)
    return not ranks.are_alive


def test_a_rank_that_fails_is_told_of_and_the_others_end_without_a_word(
    start: Start, told: queue.Queue[tuple[str, End]]
) -> None:
    ranks = start("wait", "fail", "wait")
    who, end = told.get(timeout=WAIT_S)
    assert who == "rank 2"
    assert isinstance(end, Failure)
    assert (end.error.reason, end.error.message) == ("DOES_NOT_FIT", "rank 2 has no room")
    assert ended(ranks)
    ranks.close(WAIT_S)
    assert told.empty()


def test_a_rank_that_is_killed_says_by_what(start: Start, told: queue.Queue[tuple[str, End]]) -> None:
    ranks = start("wait", "wait")
    os.kill(ranks.pids[1], signal.SIGKILL)
    who, end = told.get(timeout=WAIT_S)
    assert who == "rank 2"
    assert isinstance(end, Failure) and "rank 2 was killed by SIGKILL" in end.error.message
    assert ended(ranks)
    ranks.close(WAIT_S)
    assert told.empty()


def test_ranks_that_are_ended_are_not_told_of(start: Start, told: queue.Queue[tuple[str, End]]) -> None:
    ranks = start("wait", "wait")
    ranks.close(0.0)
    assert not ranks.are_alive
    # As often as anybody likes.
    ranks.kill()
    assert told.empty()


def test_each_rank_that_is_done_is_told_of(start: Start, told: queue.Queue[tuple[str, End]]) -> None:
    ranks = start("answer", "answer")
    assert sorted(told.get(timeout=WAIT_S)[0] for _ in range(2)) == ["rank 1", "rank 2"]
    ranks.close(WAIT_S)
    assert not ranks.are_alive
    assert told.empty()


def test_one_that_is_done_early_ends_nobody(start: Start, told: queue.Queue[tuple[str, End]]) -> None:
    ranks = start("answer", "wait")
    assert told.get(timeout=WAIT_S) == ("rank 1", Answer(None))
    assert ranks.are_alive
