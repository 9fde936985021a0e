"""Groups of workers, on a tree of plain files that looks like the kernel's, and for real where the node delegates
one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from horizon_server.control_groups import CGROUP_ROOT, remove_empty_worker_groups, worker_group

GIB = 2**30


class Tree:
    """A unified hierarchy in which systemd has delegated horizond.service."""

    def __init__(self, root: Path, own: str = "/system.slice/horizond.service/daemon") -> None:
        self.root = root / "cgroup"
        self.own_cgroup = root / "self-cgroup"
        self.own_cgroup.write_text(f"0::{own}\n")
        self.service = self.root / "system.slice" / "horizond.service"
        (self.service / "daemon").mkdir(parents=True)
        for folder in (self.root, self.service):
            (folder / "cgroup.controllers").write_text("cpu memory pids\n")
            (folder / "cgroup.subtree_control").write_text("")

    def worker(self, name: str) -> Path:
        """Make the folder that the kernel would fill when it is made."""
        folder = self.service / f"worker-{name}"
        folder.mkdir()
        for file in ("cgroup.procs", "memory.max", "memory.oom.group", "memory.events"):
            (folder / file).write_text("")
        return folder


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_worker_has_its_own_group_with_its_plan_as_limit(tree: Tree) -> None:
    folder = tree.worker("job-1")
    group, why = worker_group("job-1", 100 * GIB, root=tree.root, own_cgroup=tree.own_cgroup)
    assert group is not None, why
    assert group.path == folder
    assert (tree.service / "cgroup.subtree_control").read_text() == "+memory"
    assert int((folder / "memory.max").read_text()) == group.memory_bytes == 105 * GIB
    assert (folder / "memory.oom.group").read_text() == "1"
    assert group.add(4711) is None
    assert (folder / "cgroup.procs").read_text() == "4711"


def test_small_plans_get_a_fixed_slack(tree: Tree) -> None:
    tree.worker("job-1")
    group, _ = worker_group("job-1", GIB, root=tree.root, own_cgroup=tree.own_cgroup)
    assert group is not None
    assert group.memory_bytes == 3 * GIB


def test_the_kills_of_a_group_are_its_own(tree: Tree) -> None:
    folder = tree.worker("job-1")
    group, _ = worker_group("job-1", GIB, root=tree.root, own_cgroup=tree.own_cgroup)
    assert group is not None
    assert group.oom_kills() == 0
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n")
    assert group.oom_kills() == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("0::/system.slice/horizond.service\n", "DelegateSubgroup=daemon"),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", "Delegate=yes"),
        ("4:memory:/daemon\n", "control groups v1 only"),
        ("", "control groups v1 only"),
    ],
)
def test_a_node_that_delegates_nothing_is_explained(tree: Tree, line: str, expected: str) -> None:
    tree.own_cgroup.write_text(line)
    group, why = worker_group("job-1", GIB, root=tree.root, own_cgroup=tree.own_cgroup)
    assert group is None
    assert expected in why
    assert not list(tree.root.rglob("worker-*"))


def test_a_hybrid_node_without_a_unified_root_is_explained(tree: Tree) -> None:
    (tree.root / "cgroup.controllers").unlink()
    group, why = worker_group("job-1", GIB, root=tree.root, own_cgroup=tree.own_cgroup)
    assert group is None
    assert "v1 only" in why


def test_a_unit_without_the_memory_controller_is_explained(tree: Tree) -> None:
    (tree.service / "cgroup.controllers").write_text("pids\n")
    group, why = worker_group("job-1", GIB, root=tree.root, own_cgroup=tree.own_cgroup)
    assert group is None
    assert "no memory controller" in why


def test_a_limit_that_cannot_be_set_leaves_no_group(tree: Tree) -> None:
    # The files of a new group are missing in a plain folder: as if the kernel had no memory controller for it.
    group, why = worker_group("job-1", GIB, root=tree.root, own_cgroup=tree.own_cgroup)
    assert group is None
    assert "memory.max cannot be written" in why
    assert not list(tree.root.rglob("worker-*"))


def test_groups_of_workers_that_have_ended_are_removed(tree: Tree) -> None:
    (tree.service / "worker-old").mkdir()  # in the kernel's tree the files of a group do not count
    busy = tree.worker("busy")
    assert remove_empty_worker_groups(root=tree.root, own_cgroup=tree.own_cgroup) == 1
    assert busy.is_dir()
    assert not (tree.service / "worker-old").exists()
    assert (tree.service / "daemon").is_dir()


def test_a_real_group_kills_what_exceeds_its_memory() -> None:
    group, why = worker_group("test", 0)
    if group is None:
        pytest.skip(f"{CGROUP_ROOT}: {why}")
    eat = "import sys; sys.stdin.read(1); x = b'x' * (4 << 30)"
    child = subprocess.Popen([sys.executable, "-c", eat], stdin=subprocess.PIPE)
    try:
        assert group.add(child.pid) is None
        child.communicate(b"g", timeout=240)
        assert child.returncode == -9
        assert group.oom_kills() >= 1
    finally:
        child.kill()
        child.wait(240)
        assert group.remove()
