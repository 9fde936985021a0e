"""A state folder in which ada has pushed the built-in model and dataset: each push tries the model in a child, for
seconds."""

from __future__ import annotations

import fcntl
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.support.daemon_process import DaemonProcess

from horizon_server.blobs.space import RESERVE_FILE
from horizon_server.demo.recipe import write_demo_dataset, write_demo_model
from horizon_server.planning.machine import RATES_FILE

MODEL, DATASET = "demo-model", "demo-chats"


@dataclass(frozen=True)
class PushedState:
    """What daemons start from instead of an empty folder, and what was pushed."""

    folder: Path
    model: Path
    dataset: Path
    token: str

    @classmethod
    def shared(cls, root: Path) -> PushedState:
        """Return the one below `root`, which all processes of a test run share; the first one makes it."""
        root.mkdir(exist_ok=True)
        token = root / "token"
        with (root / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not token.exists():
                token.write_text(_push(root), "ascii")
        (dataset,) = root.glob("*.jsonl")
        return cls(root / "state", root / "model", dataset, token.read_text("ascii"))

    def daemon(self, state_dir: Path, *flags: str, **settings: float | str) -> DaemonProcess:
        """Make a daemon over a copy of the folder. `user("ada")` is who has pushed."""
        daemon = DaemonProcess(state_dir, *flags, **settings)
        shutil.copytree(self.folder, state_dir, dirs_exist_ok=True)
        daemon.tokens["ada"] = self.token
        return daemon


def _push(root: Path) -> str:
    model = write_demo_model(root / "model")
    dataset = write_demo_dataset(root)
    daemon = DaemonProcess(root / "state")
    try:
        token = daemon.start().user("ada")
        with daemon.client(token) as client:
            client.models.push(model, name=MODEL)
            client.datasets.push([dataset], name=DATASET)
        assert daemon.terminate() == 0
    finally:
        daemon.close()
    # Each daemon has a configuration, rates and a reserve of its own.
    for name in (RATES_FILE, RESERVE_FILE, "test.log", "test.toml"):
        (root / "state" / name).unlink()
    return token
