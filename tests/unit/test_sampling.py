"""Prompts for a checkpoint: what may be asked, and what memory and time a call may take."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from horizon_server.children.calls import Ask, encode_order
from horizon_server.children.child import Child, ChildTask, Limits
from horizon_server.children.entry import MAX_REQUEST_BYTES
from horizon_server.codec import from_plain, to_plain
from horizon_server.demo.recipe import write_demo_model
from horizon_server.errors import DoesNotFit, InvalidData, InvalidSpec, NotAllowed, NotFound, Stalled, WorkerDied
from horizon_server.events import SampledText
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.sampling import SampleMemory, sample_layout, sample_memory
from horizon_server.records.account import Principal
from horizon_server.records.sample import (
    MAX_ANSWERS,
    MAX_MESSAGES,
    MAX_NEW_TOKENS,
    MAX_PROMPT_CHARACTERS,
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    MAX_SAMPLES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
    SampleAdapter,
    SampleCall,
    SampleFigures,
    SampleMessage,
    SampleModel,
    SampleOptions,
    SamplePrompt,
    check_sample,
)
from horizon_server.services.sampling import Samples
from horizon_server.services.sampling_child import SamplingChild
from horizon_server.settings import child_environment

ADA = Principal(name="ada", role="user", project="ada")
BOB = Principal(name="bob", role="user", project="bob", memberships={"ada": "member"})
VIEWER = Principal(name="eve", role="viewer", project="eve")
HELLO = SamplePrompt(text="hello")
SHORT = SampleOptions(max_tokens=3)
LONG = SampleOptions(max_tokens=900)
OTHER = SamplePrompt(text="The lab box")
MUCH = 1 << 40
"""Memory that is free on the node."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("sampling") / "model")


@pytest.fixture
async def make(folder: Path, tmp_path: Path) -> AsyncIterator[Any]:
    """Makes the service over one job of ada's, whose checkpoint of step 1 is the demo model, and that of step 2 a copy
    of it."""
    copied = shutil.copytree(folder, tmp_path / "copied")

    async def get(principal: Principal, key: str) -> Any:
        return SimpleNamespace(job_id=key, owner="ada", project="ada")

    async def take(checkpoints: Any, step: int) -> Any:
        if step not in (1, 2) or (step == 2 and not copied.is_dir()):
            raise NotFound(f"no checkpoint of step {step}")
        return nullcontext()

    wakes: list[int] = []
    jobs: Any = SimpleNamespace(
        get=get,
        leases=SimpleNamespace(take=take),
        folders=SimpleNamespace(
            checkpoints=lambda _: SimpleNamespace(
                of_step=lambda step: folder if step == 1 else copied,
                manifest=lambda _: SimpleNamespace(files={}, base=None),
            )
        ),
        scheduler=SimpleNamespace(wake=lambda: wakes.append(1)),
        boxes=SimpleNamespace(has_arrived=lambda _: False),
    )
    made: list[SamplingChild] = []

    def samples(
        *, free_bytes: int = MUCH, keep_s: float = 600.0, **options: Any
    ) -> tuple[Samples, SamplingChild, list[int]]:
        child = SamplingChild(
            environment=child_environment(), free_bytes=lambda _: free_bytes, keep_s=keep_s, **options
        )
        made.append(child)
        return Samples(jobs, child, num_threads=1), child, wakes

    yield samples
    for child in made:
        await child.close()


async def everything(samples: Samples, principal: Principal = ADA, step: int = 1, *prompts: SamplePrompt) -> list[Any]:
    return [piece async for piece in samples.sample(principal, "job", step, prompts or (HELLO,), SHORT)]


def memory_of(folder: Path, free_bytes: int) -> SampleMemory:
    return sample_memory(sample_layout(open_model_folder(folder))).for_room(free_bytes)


def text_of(pieces: Sequence[Any]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, SampledText))


def idle_of(child: SamplingChild) -> tuple[int, asyncio.Task[None]]:
    """The process that is idle, and the task that ends it."""
    loaded = child._loaded
    assert loaded is not None and not loaded.num_calls and loaded.watch is not None
    return loaded.child.pid, loaded.watch


async def until(condition: Callable[[], bool]) -> None:
    """For what nothing announces."""
    async with asyncio.timeout(240):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_texts_come_before_the_figures_and_memory_is_held_meanwhile(make: Any, folder: Path) -> None:
    samples, child, wakes = make()
    start_s = time.monotonic()
    held, pieces = [], []
    async for piece in samples.sample(ADA, "job", 1, [HELLO, HELLO], SHORT):
        pieces.append(piece)
        held.append(child.held_bytes)

    *texts, figures = pieces
    assert isinstance(figures, SampleFigures)
    # With the start of the child: importing torch alone takes longer than loading this model.
    assert figures.duration_s < figures.load_s < figures.load_s + figures.duration_s <= time.monotonic() - start_s
    assert {text.prompt for text in texts if isinstance(text, SampledText) and text.ended} == {0, 1}
    assert set(held) == {memory_of(folder, MUCH).total}
    assert child.busy_bytes == 0
    assert wakes


async def test_weights_stay_in_fp32_where_there_is_room_and_answer_the_same(make: Any, folder: Path) -> None:
    least = sample_memory(sample_layout(open_model_folder(folder)))
    answers = []
    for free_bytes, keeps in ((2 * (least.total + least.kept), True), (2 * least.total + least.kept, False)):
        samples, child, _ = make(free_bytes=free_bytes)
        answers.append(text_of(await everything(samples)))
        assert child._loaded is not None and child._loaded.memory.keeps_weights is keeps
        assert child.held_bytes == least.total + keeps * least.kept
    assert answers[0] == answers[1] != ""


async def test_a_call_that_does_not_fit_beside_the_jobs_is_refused_with_the_numbers(make: Any) -> None:
    samples, child, _ = make(free_bytes=1 << 30)

    with pytest.raises(DoesNotFit, match=r"takes 4\.\d\d GiB of host memory .* leave 1\.00 GiB"):
        await everything(samples)
    assert child.held_bytes == 0


async def test_calls_for_one_model_share_passes_and_each_has_its_own_lines(make: Any) -> None:
    samples, child, _ = make()
    alone = [await everything(samples, ADA, 1, prompt) for prompt in (HELLO, OTHER)]
    assert alone[0][-1].num_passes == SHORT.max_tokens
    assert alone[0][-1].num_shared_passes == 0
    long = samples.sample(ADA, "job", 1, [HELLO], LONG)
    await anext(long)

    found = await asyncio.gather(
        everything(samples, ADA, 1, HELLO), everything(samples, BOB, 1, OTHER), everything(samples, BOB, 1, OTHER)
    )

    assert [text_of(pieces) for pieces in found] == [text_of(alone[0]), text_of(alone[1]), text_of(alone[1])]
    for pieces in found:
        assert pieces[-1].load_s == 0
        assert pieces[-1].num_passes == pieces[-1].num_shared_passes == SHORT.max_tokens
    assert child.busy_bytes > 0
    await long.aclose()
    assert child.busy_bytes == 0


async def test_calls_that_come_while_the_model_is_loaded_are_answered_by_the_same_child(make: Any) -> None:
    samples, _, _ = make()
    found = await asyncio.gather(everything(samples, ADA), everything(samples, BOB))

    assert all(pieces[-1].load_s > 0 for pieces in found)
    assert all(pieces[-1].num_shared_passes > 0 for pieces in found)


async def test_another_model_waits_until_the_calls_for_this_one_have_ended(make: Any) -> None:
    samples, _, _ = make()
    long = samples.sample(ADA, "job", 1, [HELLO], LONG)
    await anext(long)
    other = asyncio.create_task(everything(samples, BOB, 2))
    await until(lambda: len(samples._turns._waiting) == 1)
    behind = asyncio.create_task(everything(samples, BOB, 1))
    await until(lambda: len(samples._turns._waiting) == 2)
    assert not other.done()
    await long.aclose()

    assert (await other)[-1].load_s > 0
    assert (await behind)[-1].load_s > 0


async def test_a_call_that_cannot_be_answered_fails_alone(make: Any) -> None:
    samples, _, _ = make()
    long = samples.sample(ADA, "job", 1, [HELLO], LONG)
    await anext(long)
    bad = SamplePrompt(chat_json='{"messages": [{"role": "user", "content": 1}]}')
    for prompt in (bad, SamplePrompt(ids=(1 << 20,))):
        with pytest.raises(InvalidData, match=r"prompts\[0\]"):
            await everything(samples, BOB, 1, prompt)

    assert text_of(await everything(samples, BOB, 1)) != ""
    assert isinstance(await anext(long), SampledText)
    await long.aclose()


async def test_a_call_that_takes_too_long_is_ended(make: Any) -> None:
    samples, child, _ = make(limit_s=0.05)

    with pytest.raises(Stalled, match=r"were not answered within 0\.05 s"):
        await everything(samples)
    assert child.held_bytes == 0


async def test_a_call_that_takes_too_long_once_it_has_begun_ends_alone(make: Any) -> None:
    samples, child, _ = make()
    long = samples.sample(ADA, "job", 1, [HELLO], LONG)
    await anext(long)
    shared = child._loaded.child
    (call,) = shared._calls.values()
    shared._limit_s = 1e-6
    shared._look_at(call)
    shared._limit_s = 600.0
    with pytest.raises(Stalled, match="were not answered within"):
        async for _ in long:
            pass

    assert idle_of(child)[0] == shared.pid
    assert (await everything(samples))[-1].load_s == 0


async def test_a_caller_who_leaves_ends_the_call_and_not_the_child(make: Any) -> None:
    samples, child, _ = make()
    pieces = samples.sample(ADA, "job", 1, [HELLO], LONG)
    await anext(pieces)
    await pieces.aclose()
    pid, _ = idle_of(child)
    assert child.busy_bytes == 0

    again = await everything(samples)
    assert idle_of(child)[0] == pid
    assert again[-1].load_s == 0
    # Nothing is computed for the call that was left.
    assert again[-1].num_shared_passes == 0


async def test_the_child_has_the_planned_memory_as_limit(
    make: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, _, _ = make()
    given: list[Limits] = []

    async def refused(task: ChildTask, _: Any) -> Child:
        given.append(task.limits)
        raise NotFound("enough")

    monkeypatch.setattr(ChildTask, "start", refused)
    with pytest.raises(NotFound, match="enough"):
        await everything(samples)

    assert given[0].memory_bytes == memory_of(folder, MUCH).private
    # Its planes are files, in memory.
    assert given[0].file_bytes == 64 * 2**20
    assert given[0].oom_score_adj == 1000


async def test_a_model_whose_weights_are_larger_than_a_log_may_be_answers(make: Any, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    rows = 40 * 2**20 // json.loads((copied / "config.json").read_text())["hidden_size"]
    tensors = load_file(copied / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([table, table.new_zeros(rows - table.shape[0], table.shape[1])])
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    assert sample_memory(sample_layout(open_model_folder(copied))).planes > 64 * 2**20

    samples, _, _ = make(keep_s=0.0)
    assert text_of(await everything(samples, ADA, 2)) == text_of(await everything(samples))


async def test_who_may_not_use_the_node_is_refused_before_anything_is_looked_at(make: Any) -> None:
    samples, child, _ = make()
    for is_loaded in (False, True):
        if is_loaded:
            await everything(samples)
        with pytest.raises(NotFound, match="does not exist"):
            await everything(samples, Principal(name="mallory", role="user", project="mallory"))
        with pytest.raises(NotAllowed, match="viewer"):
            await everything(samples, VIEWER)
        with pytest.raises(NotFound, match="step 7"):
            await everything(samples, ADA, 7)
        assert (child.held_bytes > 0) == is_loaded


async def test_the_next_call_is_answered_by_the_child_that_has_the_model(make: Any) -> None:
    samples, child, _ = make()
    first = await everything(samples)
    pid, _ = idle_of(child)
    # Of another user, who may use the same checkpoint.
    second = await everything(samples, BOB)

    assert idle_of(child)[0] == pid
    assert text_of(first) == text_of(second) != ""
    assert first[-1].load_s > 0
    assert second[-1].load_s == 0
    assert child.busy_bytes == 0


async def test_nothing_stays_where_the_setting_is_0(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, child, _ = make(keep_s=0.0)
    for _ in range(2):
        assert (await everything(samples))[-1].load_s > 0
        assert child.held_bytes == 0
        assert child._loaded is None


async def test_an_idle_child_is_ended_after_its_time(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, child, _ = make(keep_s=0.01)
    watched: list[tuple[int, asyncio.Task[None]]] = []
    watch = SamplingChild._watch

    async def noted(self: SamplingChild, *arguments: Any) -> None:
        watched.append(idle_of(self))
        await watch(self, *arguments)

    monkeypatch.setattr(SamplingChild, "_watch", noted)
    await everything(samples)
    await until(lambda: bool(watched))
    ((pid, watching),) = watched
    await asyncio.wait_for(watching, 240)

    assert is_gone(pid)
    assert child.held_bytes == 0


async def test_an_idle_child_is_ended_for_a_job_that_does_not_fit_beside_it(make: Any, folder: Path) -> None:
    free_bytes = 20 << 30
    samples, child, _ = make(free_bytes=free_bytes)
    await everything(samples)
    pid, _ = idle_of(child)
    beside = free_bytes - memory_of(folder, free_bytes).total

    await child.make_room("job", beside)
    assert idle_of(child)[0] == pid
    await child.make_room("job", beside + 1)
    assert is_gone(pid)
    assert child.held_bytes == 0


async def test_another_model_takes_the_place_of_the_idle_one(make: Any, folder: Path) -> None:
    # Not enough for two.
    samples, child, _ = make(free_bytes=sample_memory(sample_layout(open_model_folder(folder))).total)
    await everything(samples)
    pid, _ = idle_of(child)
    other = await everything(samples, BOB, 2)

    assert other[-1].load_s > 0
    assert is_gone(pid)


async def test_a_model_whose_files_have_changed_is_loaded_again(make: Any, tmp_path: Path) -> None:
    samples, child, _ = make()
    await everything(samples, ADA, 2)
    pid, _ = idle_of(child)
    config = tmp_path / "copied" / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": [0, 1]}))
    again = await everything(samples, ADA, 2)

    assert again[-1].load_s > 0
    assert is_gone(pid)


async def test_a_model_that_is_deleted_does_not_stay_in_memory(make: Any, tmp_path: Path) -> None:
    samples, child, _ = make(look_every_s=0.01)
    await everything(samples, ADA, 2)
    pid, watch = idle_of(child)
    shutil.rmtree(tmp_path / "copied")
    await asyncio.wait_for(watch, 240)

    assert is_gone(pid)
    with pytest.raises(NotFound, match="step 2"):
        await everything(samples, ADA, 2)


async def test_after_a_crash_all_calls_have_its_error_and_the_next_one_starts_a_child(make: Any) -> None:
    samples, child, _ = make()
    await everything(samples)
    pid, _ = idle_of(child)
    os.kill(pid, signal.SIGSTOP)  # it takes the calls, and has not answered when it dies
    asked = [asyncio.create_task(everything(samples, who)) for who in (ADA, BOB)]
    await until(lambda: child._loaded.num_calls == 2)
    os.kill(pid, signal.SIGKILL)
    for task in asked:
        with pytest.raises(WorkerDied, match="the child that answers prompts was killed"):
            await task
    assert child.held_bytes == 0

    assert (await everything(samples))[-1].load_s > 0
    # Of one that dies while it is idle, callers learn nothing.
    pid, _ = idle_of(child)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not child._loaded.child.is_running)
    assert (await everything(samples))[-1].load_s > 0


async def test_the_shutdown_ends_the_idle_child_and_none_stays_after_it(make: Any) -> None:
    samples, child, _ = make()
    await everything(samples)
    pid, _ = idle_of(child)
    await samples.close()
    assert is_gone(pid)

    await everything(samples)
    assert child._loaded is None


def test_the_largest_call_fits_into_an_order() -> None:
    prompt = SamplePrompt(text="\U0001f600" * MAX_PROMPT_CHARACTERS)
    asked = SampleCall(prompts=(prompt,) * MAX_PROMPTS, options=SHORT)
    assert len(encode_order(Ask(call=1, user="ada", request=to_plain(asked)))) < MAX_REQUEST_BYTES


def test_weights_take_no_memory_for_training(folder: Path) -> None:
    found = open_model_folder(folder)
    memory = sample_memory(sample_layout(found))

    assert sample_layout(found).num_parameters == found.layout.num_parameters
    # A bf16 half each, and the alignment of what is empty.
    assert 2 * found.layout.num_parameters <= memory.planes < 2.2 * found.layout.num_parameters + 2**20


@pytest.mark.parametrize(
    ("prompts", "options", "field"),
    [
        ([], {}, "prompts"),
        ([HELLO] * (MAX_PROMPTS + 1), {}, "prompts"),
        ([HELLO, SamplePrompt()], {}, "prompts[1]"),
        ([SamplePrompt(text="a", messages=(SampleMessage(role="user", content="b"),))], {}, "prompts[0]"),
        ([SamplePrompt(text="a", chat_json="{}")], {}, "prompts[0]"),
        ([SamplePrompt(chat_json=" " * (MAX_PROMPT_CHARACTERS + 1))], {}, "prompts[0]"),
        ([SamplePrompt(text="a" * (MAX_PROMPT_CHARACTERS + 1))], {}, "prompts[0]"),
        ([SamplePrompt(messages=(SampleMessage(role="user", content="b"),) * (MAX_MESSAGES + 1))], {}, "prompts[0]"),
        ([SamplePrompt(messages=(SampleMessage(role="", content="b"),))], {}, "prompts[0]"),
        ([HELLO], {"max_tokens": 0}, "max_tokens"),
        ([HELLO], {"max_tokens": MAX_NEW_TOKENS + 1}, "max_tokens"),
        ([HELLO], {"temperature": -0.5}, "temperature"),
        ([HELLO], {"temperature": MAX_TEMPERATURE + 1.0}, "temperature"),
        ([HELLO], {"temperature": float("nan")}, "temperature"),
        ([HELLO], {"top_p": 0.0}, "top_p"),
        ([HELLO], {"top_p": float("nan")}, "top_p"),
        ([SamplePrompt(ids=(1,) * (MAX_PROMPT_TOKENS + 1))], {}, "prompts[0]"),
        ([SamplePrompt(ids=(4, -1))], {}, "prompts[0]"),
        ([SamplePrompt(text="a", ids=(4,))], {}, "prompts[0]"),
        ([HELLO], {"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens"),
        ([HELLO], {"top_k": -1}, "top_k"),
        ([HELLO], {"num_samples": 0}, "num_samples"),
        ([HELLO], {"num_samples": MAX_SAMPLES + 1}, "num_samples"),
        ([HELLO] * 3, {"num_samples": MAX_ANSWERS // 3 + 1}, "num_samples"),
        ([HELLO], {"stop": ("a",) * (MAX_STOPS + 1)}, "stop"),
        ([HELLO], {"stop": ("a" * (MAX_STOP_CHARACTERS + 1),)}, "stop"),
        ([HELLO], {"stop": ("",)}, "stop"),
        ([HELLO], {"stop_ids": (1,) * (MAX_STOPS + 1)}, "stop_ids"),
        ([HELLO], {"stop_ids": (-1,)}, "stop_ids"),
        ([HELLO], {"logprobs": MAX_TOP_LOGPROBS + 1}, "logprobs"),
        ([HELLO], {"logprobs": -1}, "logprobs"),
        ([HELLO], {"prompt_logprobs": MAX_TOP_LOGPROBS + 1}, "prompt_logprobs"),
    ],
)
def test_what_is_out_of_range_is_named(prompts: list[SamplePrompt], options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        check_sample(prompts, SampleOptions(**options))
    assert [violation.field for violation in caught.value.violations] == [field]


def test_the_largest_that_may_be_asked_is_accepted() -> None:
    chat = SamplePrompt(messages=(SampleMessage(role="user", content="b"),) * MAX_MESSAGES)
    prompts = [chat, *[SamplePrompt(text="a" * MAX_PROMPT_CHARACTERS)] * (MAX_PROMPTS - 1)]
    most = SampleOptions(
        max_tokens=MAX_NEW_TOKENS,
        temperature=MAX_TEMPERATURE,
        top_p=1.0,
        num_samples=MAX_ANSWERS // MAX_PROMPTS,
        stop=("a" * MAX_STOP_CHARACTERS,) * MAX_STOPS,
        stop_ids=(0,) * MAX_STOPS,
        logprobs=MAX_TOP_LOGPROBS,
        prompt_logprobs=MAX_TOP_LOGPROBS,
    )
    check_sample(prompts, most)
    ids = SamplePrompt(ids=(0,) * MAX_PROMPT_TOKENS)
    check_sample([ids], SampleOptions(max_tokens=0, prompt_logprobs=0, num_samples=MAX_SAMPLES))


def test_model_and_call_reach_the_child_whole() -> None:
    chat = SamplePrompt(messages=(SampleMessage(role="user", content="b"),))
    call = SampleCall(prompts=(HELLO, chat), options=SHORT)
    adapter = SampleAdapter(folder=Path("/b"), base_sha256="0" * 64, digests=Path("/c"))
    model = SampleModel(folder=Path("/a"), num_threads=2, cache_bytes=5, adapter=adapter)
    assert from_plain(SampleCall, to_plain(call)) == call
    assert from_plain(SampleModel, to_plain(model)) == model
