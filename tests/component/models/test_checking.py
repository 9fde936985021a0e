"""The child that checks model folders: small files that would take hours or gigabytes are refused, and the daemon's
loop keeps its pace."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file
from tests.conftest import MakeDaemon
from tests.support.processes import children_of, command_of
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_server.children import child
from horizon_server.children.child import ChildTask, Limits
from horizon_server.errors import InvalidModel, WorkerDied
from horizon_server.jobs.attempt import WORKER_MODULE
from horizon_server.services import model_child
from horizon_server.services.model_check import ModelFacts
from horizon_server.services.model_child import LIMITS, TRIAL_LIMITS, check_model, try_model
from horizon_server.settings import child_environment
from horizon_server.store.safetensors_files import MAX_TENSORS

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 2,
    "tie_word_embeddings": True,
}
TENSORS: dict[str, Any] = {
    "model.embed_tokens.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    "model.layers.0.mlp.weight": {"dtype": "F32", "shape": [4], "data_offsets": [32, 48]},
}
LONGEST_FREEZE_S = 1.0
"""The audit measured 2 to 17 s."""


def write(folder: Path, *, config: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    header = json.dumps(TENSORS | (tensors or {})).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(48))
    return folder


def empty(shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [48, 48]}


async def longest_freeze_s(stop: asyncio.Event) -> float:
    """Return the longest time that this process computed while the event loop was held up, until `stop`.

    Of the processor, as others on the machine hold it up too.
    """
    longest_s, last_s = 0.0, time.process_time()
    while not stop.is_set():
        await asyncio.sleep(0.01)
        now_s = time.process_time()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s


async def test_a_sound_folder_is_described(tmp_path: Path) -> None:
    assert await check_model(write(tmp_path), digests=tmp_path / "digests") == ModelFacts(
        architecture="llama", num_parameters=12
    )


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        (lambda: {"config": {"num_hidden_layers": 20_000_000}}, "num_hidden_layers is 20000000"),
        (lambda: {"config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1000000000"),
        (lambda: {"config": {"num_hidden_layers": 10**30}}, "num_hidden_layers is 1"),
        (lambda: {"config": {"intermediate_size": 10**18}}, "intermediate_size is 1"),
        (lambda: {"tensors": {"bomb": empty([2**62] * 50_000)}}, "at most 8 dimensions"),
        (lambda: {"tensors": {"bomb": empty([0] * 5_000_000)}}, "more values than"),
        (
            lambda: {"tensors": {".".join(["a", *["0"] * 20_000, "w"]): empty([0])}},
            "at most 512 characters and 4 numbers",
        ),
        (
            lambda: {"tensors": {".".join(["a", *["0"] * 100_000, "w"]): empty([0])}},
            "at most 512 characters and 4 numbers",
        ),
        (
            lambda: {"tensors": {f"t{i}": empty([0]) for i in range(700_000)}},
            "at most 200000|larger than|announces a header",
        ),
        (lambda: {"tensors": {"model.layers.\u00b2.w": empty([0])}}, "characters that a name cannot have"),
        (lambda: {"tensors": {f"model.layers.{'1' * 5000}.w": empty([0])}}, "at most 512 characters"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
async def test_every_bomb_of_the_audit_is_refused_while_the_loop_keeps_its_pace(
    tmp_path: Path, folder: Callable[[], dict[str, Any]], words: str
) -> None:
    place = write(tmp_path, **folder())
    memory_before = psutil.Process().memory_info().rss
    stop = asyncio.Event()
    watching = asyncio.create_task(longest_freeze_s(stop))
    with pytest.raises(InvalidModel, match=words) as caught:
        await asyncio.wait_for(check_model(place, digests=place / "digests"), 240)
    stop.set()
    assert await watching < LONGEST_FREEZE_S
    assert psutil.Process().memory_info().rss - memory_before < 32 * 2**20, "no memory of the daemon's own"
    assert str(tmp_path) not in caught.value.message
    assert len(caught.value.message) < 1000


async def test_a_tenth_of_the_largest_folder_stays_within_a_fifth_of_the_limits(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.down_projection_of_this_expert.weight": empty([0, 0])
        for layer in range(100)
        for expert in range(MAX_TENSORS // 1000)
    }
    place = write(tmp_path, config={"num_hidden_layers": 100}, tensors=tensors)
    assert LIMITS.memory_bytes is not None and LIMITS.cpu_s is not None
    tight = dataclasses.replace(LIMITS, memory_bytes=LIMITS.memory_bytes // 5, cpu_s=LIMITS.cpu_s // 5)
    assert (await check_model(place, digests=tmp_path / "digests", limits=tight))["num_parameters"] == 12


@pytest.mark.parametrize(
    ("limits", "words"),
    [(Limits(memory_bytes=64 * 2**20), "more memory to read"), (Limits(wall_s=0.01), "more time to read")],
)
async def test_a_check_at_its_limits_blames_the_folder(tmp_path: Path, limits: Limits, words: str) -> None:
    tensors = {f"t{i}": empty([0]) for i in range(150_000)}
    with pytest.raises(InvalidModel, match=words):
        await check_model(write(tmp_path, tensors=tensors), digests=tmp_path / "digests", limits=limits)


Act = Callable[[int], object]
"""What to do with a check while its process waits for its limits, given its id."""


@pytest.fixture
def act_on_checks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Act], None]:
    set_limits = child.limit

    def act_on(act: Act) -> None:
        def limit(pid: int, limits: Limits) -> None:
            set_limits(pid, limits)
            act(pid)

        monkeypatch.setattr(child, "limit", limit)

    return act_on


async def test_the_check_of_a_folder_has_the_limits(tmp_path: Path, act_on_checks: Callable[[Act], None]) -> None:
    kinds, found = (psutil.RLIMIT_DATA, psutil.RLIMIT_CPU, psutil.RLIMIT_FSIZE), list[tuple[int, ...]]()
    act_on_checks(lambda pid: found.append(tuple(psutil.Process(pid).rlimit(kind)[0] for kind in kinds)))
    await check_model(write(tmp_path), digests=tmp_path / "digests")
    assert found == [(LIMITS.memory_bytes, LIMITS.cpu_s, LIMITS.file_bytes)]


def checks() -> list[int]:
    return [pid for pid in children_of(os.getpid()) if "horizon_server.services.model_check" in command_of(pid)]


async def test_a_check_that_is_killed_may_be_repeated(tmp_path: Path, act_on_checks: Callable[[Act], None]) -> None:
    act_on_checks(lambda pid: os.kill(pid, signal.SIGKILL))
    with pytest.raises(WorkerDied) as caught:
        await check_model(write(tmp_path), digests=tmp_path / "digests")
    assert (caught.value.status.grpc, caught.value.retry_after_s) == ("UNAVAILABLE", 1.0)


async def test_a_check_that_is_cancelled_leaves_no_process(
    tmp_path: Path, act_on_checks: Callable[[Act], None]
) -> None:
    task = asyncio.create_task(check_model(write(tmp_path), digests=tmp_path / "digests"))
    pids: list[int] = []

    def cancel(pid: int) -> None:
        # By its id: on a busy machine it may not have become the program yet.
        assert pid in children_of(os.getpid())
        pids.append(pid)
        task.cancel()

    act_on_checks(cancel)
    await asyncio.wait([task])
    assert task.cancelled()
    assert len(pids) == 1 and not psutil.pid_exists(pids[0]) and checks() == []


def folder_of(model_type: str, folder: Path, **sizes: Any) -> Path:
    usual = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = AutoConfig.for_model(model_type, **usual, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


async def test_a_pushed_model_is_tried_before_any_job(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    async with make_daemon(tmp_path / "state", worker_module=WORKER_MODULE) as daemon:
        ada = await daemon.user("ada")
        assert (await daemon.model(ada, "good")).ready
        wrong = folder_of("xlm-roberta-xl", tmp_path / "wrong", pad_token_id=1, is_decoder=True)
        with pytest.raises(InvalidModel, match="its class counts positions otherwise than 0, 1, 2") as refused:
            await daemon.model(ada, "wrong", wrong)
        assert str(tmp_path) not in refused.value.message
        lacking = tmp_path / "lacking"
        shutil.copytree(daemon.model_folder, lacking)
        tensors = load_file(lacking / "model.safetensors")
        gone = next(name for name in tensors if "mlp" in name)
        save_file({name: tensor for name, tensor in tensors.items() if name != gone}, lacking / "model.safetensors")
        with pytest.raises(InvalidModel, match=f"tensor {re.escape(gone)} is missing"):
            await daemon.model(ada, "lacking", lacking)


async def test_a_trial_that_fails_says_nothing_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_child, "TRIAL_LIMITS", Limits(wall_s=0.01))
    await try_model(folder_of("llama", tmp_path), environment=child_environment())


async def test_a_trial_has_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Limits] = []

    async def run(task: ChildTask, _: object) -> None:
        asked.append(task.limits)

    monkeypatch.setattr(ChildTask, "run", run)
    await try_model(tmp_path, environment={})
    # `ChildTask` sets them, which `component/test_child_limits.py` shows.
    assert [(one.memory_bytes, one.cpu_s) for one in asked] == [(TRIAL_LIMITS.memory_bytes, TRIAL_LIMITS.cpu_s)]
