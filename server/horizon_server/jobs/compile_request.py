"""What the layers of a job are compiled for, the child that does it, and what is known of those that were: for the
daemon, which has it done while a job waits, and for the worker, which does it where that was not. Loads no torch."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from horizon_server.children.child import ChildTask, Limits
from horizon_server.codec import to_plain
from horizon_server.durable import replace_file
from horizon_server.planning.gpu_compiler import compiler_environment
from horizon_server.recipe import Matmul
from horizon_server.records.execution import DeviceKind, Execution
from horizon_server.spec import EVERYTHING, TrainSpec
from horizon_server.store.model_files import CONFIG_FILE
from horizon_server.version import VERSION

Urgency = Literal["idle", "low", "usual"]

COMPILER_MODULE = "horizon_server.worker.compilation"

MAX_COMPILE_S = 3600.0
"""It gets little of the processors beside jobs that train."""

MAX_KILLS = 3
"""A job is not to wait forever on a node that has no memory for the compiler."""

# Of the newest compilations, for an estimate.
_NUM_KNOWN = 20
_PROGRAMS = ("torch", "transformers", "triton")


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """What the child is asked for."""

    model: str
    library: str
    dtype: str
    device: str
    num_threads: int
    num_tokens: int
    trainable: tuple[str, ...] = EVERYTHING
    """As in the job: what is frozen has no gradient to compute."""
    lora: Mapping[str, Any] = field(default_factory=dict)
    """The adapters of the job, as its spec has them."""
    matmul: Matmul = "bf16"
    product_layers: int = 0
    """The last layers that are to keep their products, as the job's plan says."""
    urgency: Urgency = "low"
    """What it gets of the processors. `idle`, where no job waits for it: only what every other process leaves; `low`,
    beside jobs that train: little; `usual`, where a job waits for nothing else and others train: what any process
    gets."""

    @classmethod
    def of(cls, train: TrainSpec, execution: Execution, *, model: Path, library: Path) -> CompileRequest:
        """That of a job."""
        return cls(
            model=str(model),
            library=str(library),
            dtype=execution.compute_dtype,
            device="cpu" if execution.device_kind == "host" else "cuda",
            num_threads=execution.num_threads,
            num_tokens=min(max(train.sequence_length, execution.micro_batch_tokens), train.tokens_per_step),
            trainable=train.trainable,
            lora=train.lora.model_dump(mode="json"),
            matmul=train.matmul,
            product_layers=execution.residency.product_layers,
        )

    @property
    def device_kind(self) -> DeviceKind:
        """Where the code runs."""
        return "cuda" if self.device.startswith("cuda") else "host"

    def identity(self) -> str:
        """Return what tells it from others on this node; models with the same config.json are one. Blocking. Raises
        OSError."""
        plain = to_plain(self)
        for name in ("model", "library", "urgency"):
            del plain[name]
        config = hashlib.sha256((Path(self.model) / CONFIG_FILE).read_bytes()).hexdigest()
        text = json.dumps([plain, config, VERSION, [_version_of(name) for name in _PROGRAMS]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def task(self, environment: Mapping[str, str]) -> ChildTask:
        """Return the child that makes what the library lacks, with `environment` and the folder of the compiler's own
        files, which is made."""
        scratch = Path(self.library) / "scratch"
        scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        # TORCHINDUCTOR_CACHE_DIR is read by the compiler: its own default is a folder in /tmp that anybody could have
        # made before.
        variables = {**environment, "TORCHINDUCTOR_CACHE_DIR": str(scratch), "TMPDIR": str(scratch)}
        return ChildTask(
            module=COMPILER_MODULE,
            who="the compilation",
            environment=variables if self.device_kind == "host" else compiler_environment(variables, scratch),
            limits=Limits(wall_s=MAX_COMPILE_S),
        )


class MadeBook:
    """What was compiled already, by the identity of the request: so that the daemon need not ask a child, which loads
    torch for that. Blocking."""

    def __init__(self, library: Path) -> None:
        self._library, self._folder = library, library / "made"

    def has(self, identity: str) -> bool:
        """Return whether the library has all that this request asks for, its refusals included."""
        file = self._folder / f"{identity}.json"
        known = self._read(file)
        if known is None or not all((self._library / f"{key}.json").exists() for key in known["keys"]):
            return False
        os.utime(file)  # the sweep removes what is not used for long
        return True

    def add(self, identity: str, keys: list[str], *, device: str, seconds: float) -> None:
        """Keep that a request was carried out in that time; 0 where the library had everything."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = json.dumps({"keys": keys, "device": device, "seconds": seconds})
        replace_file(self._folder / f"{identity}.json", text)

    def expected_s(self, device: str) -> float | None:
        """Return how long a request takes, by the newest ones that compiled something; None while there is none."""
        files = sorted(self._folder.glob("*.json"), key=lambda file: -file.stat().st_mtime)
        known = [found for file in files if (found := self._read(file)) and found["device"] == device]
        return (
            statistics.median(times) if (times := [k["seconds"] for k in known if k["seconds"]][:_NUM_KNOWN]) else None
        )

    @staticmethod
    def _read(file: Path) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(file.read_bytes())
            return found
        return None


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
