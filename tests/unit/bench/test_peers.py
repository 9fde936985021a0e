"""What people would run instead: two real peers in processes of their own take turns, and one that fails leaves."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.models import SHAPES
from bench.peers.contest import Entrant, table, take_turns
from bench.peers.environments import NotInstalled, made, requirements
from bench.peers.material import write_model, write_rows
from bench.peers.process import PeerFailed, PeerProcess
from bench.peers.protocol import Rows, Task
from bench.peers.roster import PEERS

ROWS, ROW_TOKENS, ROUNDS, STEPS = 2, 24, 2, 1
HERE = Path(__file__).parents[3] / "bench" / "peers"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By type of computation."""
    folder = tmp_path_factory.mktemp("peers")
    write_model(folder / "model", "6m")
    num_steps = (ROUNDS + 1) * STEPS
    write_rows(folder, vocab_size=SHAPES["6m"]["vocab_size"], num_rows=num_steps * ROWS, row_tokens=ROW_TOKENS)
    paths = {}
    for dtype in ("float32", "bfloat16"):
        paths[dtype] = folder / f"{dtype}.json"
        Task(
            model=str(folder / "model"),
            data=str(folder),
            device="cpu",
            dtype=dtype,
            num_threads=1,
            num_steps=num_steps,
            rows_per_step=ROWS,
            rows_at_once=1,
            learning_rate=1e-3,
            lora_rank=4,
            lora_alpha=8.0,
            beta=0.1,
            library=str(folder / "library"),
            scratch=str(folder),
        ).write(paths[dtype])
    return paths


def command(task: Path, name: str = "plain") -> list[str]:
    return [sys.executable, "-m", "bench.peers.plain", name, str(task)]


@pytest.fixture
def entrants(tasks: dict[str, Path], tmp_path: Path) -> Iterator[list[Entrant]]:
    made = [Entrant(name=dtype, title=f"plain in {dtype}") for dtype in tasks]
    made.append(Entrant(name="broken", title="broken"))
    for entrant, own in zip(made, [*map(command, tasks.values()), command(tmp_path / "missing.json")], strict=True):
        entrant.start(own, tmp_path / f"{entrant.name}.log")
    yield made
    for entrant in made:
        if entrant.process is not None:
            entrant.process.end()


def test_peers_take_turns_and_one_that_fails_says_why_in_its_row(entrants: list[Entrant]) -> None:
    take_turns(entrants, "a contest", num_rounds=ROUNDS, num_steps=STEPS)

    exact, rounded, broken = entrants
    # The same rows in the same order: the same model, but for rounding.
    assert exact.loss == pytest.approx(rounded.loss, rel=5e-3)
    assert exact.loss != rounded.loss
    assert [len(entrant.turns) for entrant in entrants] == [ROUNDS, ROUNDS, 0]
    assert "missing.json" in broken.refusal
    rows = table(entrants, tokens_per_turn=STEPS * ROWS * ROW_TOKENS)
    ratio = r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)"
    assert re.match(rf"\| plain in bfloat16 \| [\d,]+ \| {ratio} \| {ratio} \| [\d,]+ \|", rows[3])
    assert rows[4].startswith("| broken | failed: ended with 1: FileNotFoundError")
    assert len({row.count("|") for row in rows}) == 1


def test_a_process_that_ends_in_its_turn_is_reported_with_its_last_line(tmp_path: Path) -> None:
    script = "import sys; print('{\"ready_s\": 1}', flush=True); input(); sys.exit('no memory left')"
    peer = PeerProcess([sys.executable, "-c", script], tmp_path / "log")
    try:
        assert peer.wait_until_ready() == 1
        with pytest.raises(PeerFailed, match="ended with 1: no memory left"):
            peer.steps(1)
    finally:
        peer.end()


def test_memory_is_counted_with_children_and_what_they_share_once(tmp_path: Path) -> None:
    script = (
        "import mmap, os, sys, time\n"
        "memory = mmap.mmap(-1, 64 << 20)\n"
        "memory.write(b'x' * (64 << 20))\n"
        "if os.fork() == 0:\n"
        "    memory.seek(0); sum(memory[::4096]); time.sleep(60); os._exit(0)\n"
        "print('{\"ready_s\": 0}', flush=True); input()\n"
    )
    peer = PeerProcess([sys.executable, "-c", script], tmp_path / "log")
    try:
        peer.wait_until_ready()
        peer.memory.sample()
        # The written bytes were in its own memory too for a moment; a second count of the shared ones would be above.
        assert 64 << 20 < peer.memory.whole_bytes < 180 << 20
        peer.memory.begin_steps()
        peer.memory.sample()
        assert 64 << 20 < peer.memory.steps_bytes < 110 << 20
    finally:
        peer.end()


def test_answers_of_a_pair_share_their_prompt(tasks: dict[str, Path]) -> None:
    rows = Rows(Task.read(tasks["float32"]))
    answers, prompt = rows.answers(), rows.num_prompt_tokens
    assert (answers[::2, :prompt] == answers[1::2, :prompt]).all()
    assert (answers[::2, prompt:] != answers[1::2, prompt:]).any()


def test_every_peer_has_a_module_and_pinned_packages() -> None:
    for peer in PEERS:
        assert (HERE / f"{peer.module}.py").is_file()
        packages = [line for line in requirements(peer.environment).read_text("ascii").split("\n") if line]
        assert all("==" in line or line.startswith(("#", "-r ")) for line in packages)


def test_modules_of_peers_import_nothing_of_horizon() -> None:
    for module in {peer.module for peer in PEERS} | {"chats", "protocol"}:
        assert "horizon_" not in (HERE / f"{module}.py").read_text("utf-8"), module


def test_packages_that_cannot_be_installed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    missing = tmp_path / "requirements.txt"
    missing.write_text("horizon-has-no-such-package==1.0\n", "ascii")
    monkeypatch.setattr("bench.peers.environments.requirements", lambda name: missing)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NotInstalled, match="horizon-has-no-such-package"):
        made(tmp_path / "environments", "some", said.append)
    assert "making the environment some" in said[0]
