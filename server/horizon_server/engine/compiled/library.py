"""Compiled layers on disk: one file of code per kind of layer, with what its trial found. Jobs of one model share them.

A file goes by a key of everything that its code depends on: the model's structure, the versions of the programs that
made it, and the machine. So a job that is resumed runs the very code that it began with.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from horizon_server.durable import replace_file
from horizon_server.engine.template import Template
from horizon_server.recipe import Matmul
from horizon_server.store.triton_kernels import triton_version

_CHUNK_BYTES = 1 << 20
_MAX_BYTES = 2 << 30
# Of the newest entries, for an estimate.
_NUM_KNOWN = 20
# What a config says about where it came from, how text is made, and what is before and after the layers and how many
# there are, not about one layer.
_NOT_STRUCTURE = frozenset(
    {
        *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "tie_word_embeddings"),
        *("vocab_size", "num_hidden_layers"),
    }
)

Kernels = Literal["inductor", "triton"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What layers are compiled for. `num_tokens` are those of a usual micro-batch, for which the code is best;
    `matmul` is what products are computed in."""

    dtype: torch.dtype
    device: torch.device
    num_threads: int
    num_tokens: int
    matmul: Matmul = "bf16"

    @property
    def processor(self) -> list[str]:
        """What the code can run on."""
        if self.device.type == "cuda":
            return [torch.cuda.get_device_name(self.device), str(torch.cuda.get_device_capability(self.device))]
        return [platform.machine(), _cpu_flags()]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known of one kind of layer. `refusal` says why it has no code; where it is empty, there is a file of it.

    `speedup` is by how much the code is faster than the eager layer, which only `auto` asks for. `kernels` are the
    compiler's own, or Triton's (`fused`) where those were faster. `returned`, `min_tokens` and `max_tokens` are as in
    `graphs`, `sha256` is that of the file of code.
    """

    refusal: str = ""
    sha256: str = ""
    returned: tuple[str, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 0
    error: float = 0.0
    speedup: float = 0.0
    compile_s: float = 0.0
    kernels: Kernels = "inductor"


class CodeLibrary:
    """The folder of compiled layers. Processes may share it: who makes an entry holds its lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def scratch(self) -> Path:
        """Where the compiler works, and keeps what it may use again."""
        return self._folder / "scratch"

    def make_scratch(self) -> Path:
        """Make the folder where the compiler works, empty where it has grown large."""
        if sum(file.stat().st_size for file in self.scratch.rglob("*") if file.is_file()) > _MAX_BYTES:
            shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.scratch

    def code(self, key: str) -> Path:
        """The file of an entry's code."""
        return self._folder / f"{key}.pt2"

    def find(self, key: str) -> Entry | None:
        """An entry whose code is whole, or None."""
        try:
            plain = json.loads(self._facts(key).read_bytes())
            entry = Entry(**{**plain, "returned": tuple(plain["returned"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        if not entry.refusal:
            # Before it is loaded: a torn file would end the process.
            if sha256_of(self.code(key)) != entry.sha256:
                return None
            os.utime(self.code(key))
        return entry

    def add(self, key: str, entry: Entry) -> None:
        """Keep an entry; its code is in its file already. The oldest entries make room."""
        replace_file(self._facts(key), json.dumps(asdict(entry), indent=1))
        self._make_room(key)

    def expected_s(self) -> float | None:
        """How long a kind of layer takes to compile on this node, by those made last; None while there are none."""
        files = sorted(self._folder.glob("*.json"), key=lambda file: -file.stat().st_mtime)
        times = []
        for file in files[:_NUM_KNOWN]:
            with suppress(OSError, ValueError):
                times.append(float(json.loads(file.read_bytes()).get("compile_s", 0.0)))
        return statistics.median(found) if (found := [seconds for seconds in times if seconds]) else None

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the entry: another process that wants to make it waits."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._folder / f"{key}.lock").open("w") as stream:
            # The kernel releases it with the process, however that ends.
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def _facts(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _make_room(self, kept: str) -> None:
        files = sorted(self._folder.glob("*.pt2"), key=lambda file: file.stat().st_mtime)
        total = sum(file.stat().st_size for file in files)
        for file in files:
            if total <= _MAX_BYTES:
                return
            if file.stem != kept:
                total -= file.stat().st_size
                # The facts first: code without facts is never loaded.
                self._facts(file.stem).unlink(missing_ok=True)
                file.unlink(missing_ok=True)


def layer_key(template: Template, layer: int, target: Target) -> str:
    """The key of a layer's code: equal keys mean equal code."""
    config = _structure(template.config.to_dict(), layer)
    places = [(p.name, p.piece.shape, getattr(p.piece, "strides", None), p.trained) for p in template.places[layer + 1]]
    parts: list[Any] = [
        config,
        layer,
        places,
        template.adapter_scale if template.has_adapters else None,
        str(target.dtype),
        target.num_threads,
        target.num_tokens,
        target.matmul,
        target.processor,
        torch.__version__,
        triton_version(target.device),
        transformers.__version__,
        _sources_digest(),
    ]
    text = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def products_key(key: str) -> str:
    """The key of the pair of the same layer that keeps products (`kept`). Its facts compare it with the other pair."""
    return f"{key}-products"


def _structure(config: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """What a config says about one layer: of the kinds of all layers, the layer's own."""
    found = {name: value for name, value in config.items() if name not in _NOT_STRUCTURE}
    if isinstance(found.get("layer_types"), list):
        found["layer_types"] = found["layer_types"][layer]
    return found


def sha256_of(path: Path) -> str:
    """The digest of a file, empty where there is none."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError:
        return ""
    return digest.hexdigest()


@functools.cache
def _sources_digest() -> str:
    """Of the engine's code, which decides what is traced."""
    digest = hashlib.sha256()
    engine = Path(__file__).parent.parent
    for file in sorted(engine.rglob("*.py")):
        digest.update(file.relative_to(engine).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _cpu_flags() -> str:
    flags = [
        line for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if line.startswith(("flags", "Features"))
    ]
    return flags[0] if flags else ""
