"""Results in the order of the items from any number of processes, and a sentence when one of them is killed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, sys
from horizon_server.datasets.preparing import ordered_map
from horizon_server.errors import WorkerDied

read = []

def items():
    for number in range(100):
        read.append(number)
        yield number

def work(number):
    if sys.argv[2] == "die" and number == 50:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number

try:
    for place, result in enumerate(ordered_map(work, items(), num_processes=int(sys.argv[1]))):
        assert result == place * place
        assert len(read) <= place + 2 * int(sys.argv[1]) + 1, "read too far ahead"
except WorkerDied as error:
    print(error.message)
else:
    print(place)
"""


def outcome(*arguments: str) -> str:
    """Run in a fresh interpreter: processes are forked, which a test runner with threads of its own should not do."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_results_come_in_order_and_little_is_read_ahead() -> None:
    assert outcome("1", "live") == outcome("2", "live") == outcome("5", "live") == "99"


def test_a_killed_process_is_reported() -> None:
    assert "was killed, by hand or by the kernel for lack of memory" in outcome("2", "die")
