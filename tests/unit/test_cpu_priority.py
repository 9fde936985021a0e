"""What a process gets of the processors while it is being loaded, and that it has its usual part again without
privileges."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from horizon_server import cpu_priority
from horizon_server.control_groups import WorkerGroup, own_worker_group
from horizon_server.cpu_priority import in_lowered_thread

needs_sessions = pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="this kernel does not group processes by session"
)
_START = """
import ctypes, os, threading, time
from horizon_server import cpu_priority as p
# As the daemon of a node, which is not root; the kernel then hides the own files unless told otherwise.
if os.getuid() == 0:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
    assert ctypes.CDLL(None).prctl(4, 1) == 0
def show():
    print(open("/proc/self/autogroup").read().split()[-1], os.getpriority(os.PRIO_PROCESS, 0))
"""


def run(program: str) -> list[str]:
    """What a program without privileges prints, in a session of its own as workers have."""
    done = subprocess.run(
        [sys.executable, "-c", _START + program],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_sessions
def test_what_is_lowered_while_loading_is_restored_without_privileges() -> None:
    # The nice value of the process itself stays as it is, because it could not be lowered again.
    assert run("p.lower_while_loading(); show(); assert p.restore(); show()") == ["15 0", "0 0"]


@needs_sessions
def test_many_workers_at_once_are_restored_though_the_kernel_takes_few_such_changes_a_second() -> None:
    assert run("for _ in range(4):\n    p.lower_while_loading(); assert p.restore()\nshow()") == ["0 0"]


@needs_sessions
def test_a_session_that_belongs_to_others_is_left_as_it_is() -> None:
    # The child is in the session of the program that started it.
    program = """
child = os.fork()
if not child:
    p.lower_while_loading(); show(); os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    assert run("import sys; sys.stdout.reconfigure(line_buffering=True)" + program) == ["0 0"]


def test_what_ends_with_the_loading_is_lowered_for_good() -> None:
    (shown,) = run("p.lower_for_good(); print(os.getpriority(os.PRIO_PROCESS, 0))")
    assert shown == "15"


def test_a_lowered_thread_leaves_the_others_as_they_are() -> None:
    program = """
def nice():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
print(p.in_lowered_thread(nice), nice())
"""
    assert run(program) == ["15 0"]
    with pytest.raises(ZeroDivisionError):
        in_lowered_thread(lambda: 1 // 0)


def test_the_group_of_a_worker_has_a_weight_and_the_daemons_is_left_alone(tmp_path: Path) -> None:
    own_cgroup, root = tmp_path / "self", tmp_path / "cgroup"
    folder = root / "system.slice" / "horizond.service" / "worker-job_1-1"
    folder.mkdir(parents=True)
    (folder / "cpu.weight").write_text("100")
    own_cgroup.write_text("0::/system.slice/horizond.service/worker-job_1-1\n")
    group = own_worker_group(root=root, own_cgroup=own_cgroup)
    assert group is not None
    assert group.set_cpu_weight(4) is None
    assert (folder / "cpu.weight").read_text() == "4"
    (folder / "cpu.weight").unlink()  # as where the unit delegates memory alone
    assert "cpu.weight cannot be written" in str(group.set_cpu_weight(4))
    own_cgroup.write_text("0::/system.slice/horizond.service/daemon\n")
    assert own_worker_group(root=root, own_cgroup=own_cgroup) is None


def test_a_group_without_a_weight_has_nothing_to_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be tried again before every turn, and the kernel takes few such changes a second."""
    monkeypatch.setattr(cpu_priority, "own_worker_group", lambda: WorkerGroup(path=tmp_path, memory_bytes=0))
    monkeypatch.setattr(cpu_priority, "_SESSION", tmp_path / "none")
    assert cpu_priority.restore()
    (tmp_path / "cpu.weight").write_text("4")
    assert cpu_priority.restore()
    assert (tmp_path / "cpu.weight").read_text() == "100"
