"""Adapters on the node: pushed, started from, merged, and what is refused of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import MakeDaemon
from tests.daemon_parts import ROOT, DaemonParts
from tests.support.adapters import LORA, lora_on, store_of_adapters, write_adapter, write_adapter_checkpoint
from tests.support.further import further
from transformers import AutoModelForCausalLM

from horizon_formats.model_files import pushed_files
from horizon_server.errors import DiskFull, InUse, InvalidModel, InvalidSpec, NotAllowed, NotFound, QuotaExceeded
from horizon_server.events import MergeProgress, Message
from horizon_server.main import sweep
from horizon_server.records.account import Principal
from horizon_server.records.job import CheckpointRecord, JobRecord, JobState
from horizon_server.records.sample import SampleFigures, SampleOptions, SamplePrompt
from horizon_server.services import pushed
from horizon_server.services.merging import remove_cut_merges
from horizon_server.store.adapter_files import is_adapter_folder, read_adapter_folder
from horizon_server.store.base_digest import DigestBook, model_digest
from horizon_server.store.checkpoint_parts import Export, MergeBase
from horizon_server.store.manifest import is_complete
from horizon_server.store.merging import merged_bytes, read_origin
from horizon_server.worker.continuation import load


@pytest.fixture
async def daemon(make_daemon: MakeDaemon, state_dir: Path) -> AsyncIterator[DaemonParts]:
    """Without a queue: jobs stay as they are put."""
    async with make_daemon(state_dir, queue=False) as made:
        yield made


async def source_of(
    daemon: DaemonParts, owner: Principal, export: Export = "adapter", *, base: str = "source", **changes: Any
) -> JobRecord:
    """An ended job named `first` with a checkpoint of adapters at step 3, whose base was kept in the format `base`."""
    job = await daemon.job_in(JobState.SUCCEEDED, owner, name="first", train=lora_on(base), **changes)
    folder = daemon.services.jobs.folders.checkpoints(job.job_id).of_step(3)
    write_adapter_checkpoint(folder, daemon.model_folder, export=export, base=base)
    return job


def what_is_there(folder: Path) -> set[str]:
    """All names in a checkpoint, hidden ones too."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


async def merged(daemon: DaemonParts, owner: Principal, job: JobRecord, **options: Any) -> list[MergeProgress]:
    lines = [line async for line in daemon.services.merges.merge(owner, job.job_id, 3, **options)]
    assert isinstance(lines[-1], CheckpointRecord)
    return [line for line in lines if isinstance(line, MergeProgress)]


async def test_a_pushed_adapter_is_checked_and_named(daemon: DaemonParts, ada: Principal, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", daemon.model_folder)
    record = await daemon.model(ada, "mine", folder)
    assert (record.architecture, record.ready) == ("peft-lora", True)
    assert record.num_parameters == read_adapter_folder(folder).num_parameters
    broken = write_adapter(tmp_path / "broken", daemon.model_folder, modules_to_save=["lm_head"])
    with pytest.raises(InvalidModel, match=r"'modules_to_save' is .*; it trains whole modules") as refused:
        await daemon.model(ada, "broken", broken)
    assert str(daemon.state_dir) not in refused.value.message


async def test_a_job_starts_from_a_pushed_adapter(daemon: DaemonParts, ada: Principal, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", daemon.model_folder)
    record = await daemon.model(ada, "mine", folder)
    job = await daemon.submit(ada, "second", init_from="mine", train=LORA)
    await daemon.services.models.delete(ada, record.model_id)

    services = daemon.services.jobs
    assert await services.resources.model_of(job) == daemon.model_folder, "the base is the job's model"
    start = services.folders.start(job.job_id)
    assert (start / "adapter_model.safetensors").read_bytes() == (folder / "adapter_model.safetensors").read_bytes()
    event = await anext(daemon.parts.journal.follow(job.job_id, 1))
    text = "it does not say which weights it was trained on, so it was compared with the model by names and shapes only"
    assert event.payload == Message(level="info", text=f"starts with the adapter mine; {text}")
    assert not (start / "base.sha256").exists()
    assert is_adapter_folder(start), "the attempt hands it to the worker"


async def test_a_pushed_adapter_that_names_its_base_is_compared_with_it(
    daemon: DaemonParts, ada: Principal, tmp_path: Path
) -> None:
    checkpoint = write_adapter_checkpoint(tmp_path / "checkpoint", daemon.model_folder)
    shutil.rmtree(checkpoint / "trainer")  # as `horizon checkpoint pull` leaves it
    assert "base.sha256" in pushed_files(checkpoint)
    await daemon.model(ada, "mine", checkpoint)
    job = await daemon.submit(ada, "second", init_from="mine", train=LORA)
    event = await anext(daemon.parts.journal.follow(job.job_id, 1))
    text = "starts with the adapter mine; the digest of the model that it was trained on is that of this job's model"
    assert event.payload == Message(level="info", text=text)

    start, store = daemon.services.jobs.folders.start(job.job_id), store_of_adapters(daemon.model_folder)
    own = model_digest(daemon.model_folder)
    assert (start / "base.sha256").read_text() == own
    load(store, model=daemon.model_folder, resume_from=None, from_memory=False, adapter=start, base_sha256=lambda: own)
    words = (
        "the model is not the one that the adapter of init_from was trained on: its digest is 000000000000, not "
        f"{own[:12]}"
    )
    with pytest.raises(InvalidModel, match=words):
        load(
            store,
            model=daemon.model_folder,
            resume_from=None,
            from_memory=False,
            adapter=start,
            base_sha256=lambda: "0" * 64,
        )
    store.close()


async def test_an_adapter_of_another_model_is_refused_when_the_job_is_submitted(
    daemon: DaemonParts, ada: Principal, tmp_path: Path
) -> None:
    checkpoint = write_adapter_checkpoint(tmp_path / "checkpoint", daemon.model_folder)
    shutil.rmtree(checkpoint / "trainer")
    (checkpoint / "base.sha256").write_text("0" * 64)
    await daemon.model(ada, "other", checkpoint)
    words = (
        rf"the model {re.escape(str(daemon.model_folder))} is not the one that the adapter of init_from was trained "
        r"on: "
        "its digest is .{12}, not 000000000000; "
    )
    with pytest.raises(InvalidSpec, match=words) as refused:
        await daemon.submit(ada, "second", init_from="other", train=LORA)
    assert [violation.field for violation in refused.value.violations] == ["init_from"]
    with pytest.raises(InvalidSpec, match=words):
        await daemon.services.jobs.plan(ada, daemon.spec(init_from="other", train=LORA))


async def test_a_digest_is_made_at_the_push_and_does_not_depend_on_shards(
    daemon: DaemonParts, ada: Principal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_adapter_checkpoint(tmp_path / "checkpoint", daemon.model_folder)
    shutil.rmtree(checkpoint / "trainer")
    await daemon.model(ada, "mine", checkpoint)
    sharded = tmp_path / "sharded"
    shutil.copytree(daemon.model_folder, sharded)
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(tensors)}
    for file in sorted(set(names.values())):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    await daemon.model(ada, "again", sharded)

    async def unread(*_: object, **__: object) -> str:
        raise AssertionError("the weights of a pushed model are read once, when it is pushed")

    monkeypatch.setattr(pushed, "model_digest", unread)
    assert (await daemon.submit(ada, "second", init_from="mine", model="again", train=LORA)).job_id


async def test_the_digest_of_a_folder_of_the_node_is_waited_for_only_so_long(
    daemon: DaemonParts, ada: Principal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_adapter_checkpoint(tmp_path / "checkpoint", daemon.model_folder)
    shutil.rmtree(checkpoint / "trainer")
    await daemon.model(ada, "mine", checkpoint)
    slow, read = asyncio.Event(), []

    async def reads(folder: Path, *, digests: Path) -> str:
        read.append(folder)
        await slow.wait()
        return DigestBook(digests).digest(folder)

    monkeypatch.setattr(pushed, "model_digest", reads)
    monkeypatch.setattr(pushed, "DIGEST_WAIT_S", 0.01)
    for _ in range(2):
        with pytest.raises(InUse, match="being read for their digest, which is done once; try again in a minute"):
            await daemon.submit(ada, "second", init_from="mine", train=LORA)
    slow.set()
    monkeypatch.setattr(pushed, "DIGEST_WAIT_S", 60.0)
    assert (await daemon.submit(ada, "second", init_from="mine", train=LORA)).job_id
    assert read == [daemon.model_folder], "two submissions waited for one reading"


@pytest.mark.parametrize("content", [b"", b"no digest", b"a" * 63, b"\xff" * 64, b"a" * 1000])
async def test_a_digest_that_is_none_is_refused_when_it_is_pushed(
    daemon: DaemonParts, ada: Principal, tmp_path: Path, content: bytes
) -> None:
    folder = write_adapter(tmp_path / "adapter", daemon.model_folder)
    with pytest.raises(InvalidModel, match=r"base\.sha256 must hold a sha256, 64 digits"):
        await daemon.model(ada, "mine", folder, extra={"base.sha256": content})


@pytest.mark.parametrize(
    ("options", "lora", "words"),
    [
        ({}, {"rank": 8}, r"train\.lora\.rank is 8, and the adapter has 4; write rank: 4"),
        ({}, {"alpha": 3}, r"train\.lora\.alpha is 3, and the adapter has 12; write alpha: 12"),
        ({"use_rslora": True}, {}, r"train\.lora\.rslora is false, and the adapter has true; write rslora: true"),
        ({"use_dora": True}, {}, r"train\.lora\.dora is false, and the adapter has true; write dora: true"),
        (
            {},
            {"targets": ["q_proj"]},
            r"train\.lora\.targets differ: the adapter also has .*down_proj.*; write targets: \[down_proj, q_proj\]",
        ),
        (
            {},
            {"rank": 8, "targets": "all-linear"},
            r"rank is 8, and the adapter has 4; write rank: 4; train\.lora\.targets differ: the adapter lacks .* and "
            r"\d+ more; write",
        ),
        (
            {"fan_in_fan_out": True},
            {},
            "init_from: the adapter of .* is for a weight of shape|fan_in_fan_out .* must be false",
        ),
    ],
)
async def test_what_differs_from_the_adapter_is_named_with_the_value_to_write(
    daemon: DaemonParts, ada: Principal, tmp_path: Path, options: dict[str, Any], lora: dict[str, Any], words: str
) -> None:
    await daemon.model(ada, "mine", write_adapter(tmp_path / "adapter", daemon.model_folder, **options))
    train = {**LORA, "lora": {**LORA["lora"], **lora}}
    with pytest.raises(InvalidSpec, match=words):
        await daemon.submit(ada, "second", init_from="mine", train=train)
    with pytest.raises(InvalidSpec, match=words):
        await daemon.services.jobs.plan(ada, daemon.spec("second", init_from="mine", train=train))


async def test_adapters_and_models_are_not_taken_for_each_other(
    daemon: DaemonParts, ada: Principal, tmp_path: Path
) -> None:
    await daemon.model(ada, "mine", write_adapter(tmp_path / "adapter", daemon.model_folder))
    await daemon.model(ada, "tiny")
    with pytest.raises(InvalidSpec, match=r"model: mine is an adapter; give its base as model"):
        await daemon.submit(ada, model="mine")
    with pytest.raises(InvalidSpec, match=r"init_from: tiny is a model, not an adapter"):
        await daemon.submit(ada, init_from="tiny", train=LORA)
    with pytest.raises(InvalidSpec, match=r"init_from: mine is without an @, .* this job trains none"):
        await daemon.submit(ada, init_from="mine")
    with pytest.raises(NotFound):
        await daemon.submit(ada, init_from="yours", train=LORA)


@pytest.mark.parametrize("export", ["adapter", "merged", "both"])
async def test_a_job_of_adapters_starts_from_another_ones_checkpoint(
    daemon: DaemonParts, ada: Principal, export: Export
) -> None:
    await source_of(daemon, ada, export)
    job = await daemon.submit(ada, "second", init_from="first@last", train=LORA)
    start = daemon.services.jobs.folders.start(job.job_id)
    assert await daemon.services.jobs.resources.model_of(job) == daemon.model_folder
    assert read_adapter_folder(start).config.rank == 4
    assert len((start / "base.sha256").read_text()) == 64
    assert not (start / "config.json").exists() and not (start / "merged").exists()


async def test_a_job_of_the_whole_model_starts_from_what_is_merged(daemon: DaemonParts, ada: Principal) -> None:
    source = await source_of(daemon, ada)
    with pytest.raises(InvalidSpec, match=rf"merge it first \(horizon checkpoint merge {source.job_id}@3\)"):
        await daemon.submit(ada, "second", init_from="first@last")
    await merged(daemon, ada, source)
    job = await daemon.submit(ada, "second", init_from="first@last")
    model = await daemon.services.jobs.resources.model_of(job)
    assert model == daemon.services.jobs.folders.start(job.job_id) and (model / "model.safetensors").is_file()
    assert not (model / "adapter_config.json").exists()


async def test_the_node_merges_once_and_undoes_it(daemon: DaemonParts, ada: Principal) -> None:
    source = await source_of(daemon, ada)
    checkpoints = daemon.services.jobs.folders.checkpoints(source.job_id)
    before = checkpoints.manifest(3)
    progress = await merged(daemon, ada, source, dtype="fp32")

    assert progress[-1].done_bytes == progress[-1].total_bytes > 0
    folder = checkpoints.of_step(3)
    assert is_complete(folder) and checkpoints.manifest(3).base == before.base
    new = {name for name in checkpoints.manifest(3).files if name not in before.files}
    assert new >= {f"merged/{name}" for name in ("model.safetensors", "config.json", "README.md", "job.yaml")}
    assert "library_name: transformers" in (folder / "merged/README.md").read_text()
    assert daemon.services.jobs.folders.checkpoint_bytes()[source.job_id] == checkpoints.manifest(3).size_bytes
    model = AutoModelForCausalLM.from_pretrained(folder / "merged")
    assert model.dtype == torch.float32
    assert await merged(daemon, ada, source) == [], "it is there already"

    assert await merged(daemon, ada, source, remove=True) == []
    assert checkpoints.manifest(3) == before and not (folder / "merged").exists()


def dtypes_in(folder: Path) -> set[torch.dtype]:
    return {tensor.dtype for tensor in load_file(folder / "merged/model.safetensors").values()}


async def test_a_merged_model_of_another_dtype_takes_the_place_of_the_one_that_is_there(
    daemon: DaemonParts, ada: Principal
) -> None:
    source = await source_of(daemon, ada)
    checkpoints = daemon.services.jobs.folders.checkpoints(source.job_id)
    folder = checkpoints.of_step(3)
    formats: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
    for name, dtype in formats.items():
        assert await merged(daemon, ada, source, dtype=name), "it is made"
        assert dtypes_in(folder) == {dtype}
        assert await merged(daemon, ada, source, dtype=name) == [], "the same is not made again"
        assert not (folder / "merged.new").exists() and is_complete(folder)
        listed = checkpoints.manifest(3).files["merged/model.safetensors"]
        assert listed.size_bytes == (folder / "merged/model.safetensors").stat().st_size
        assert hashlib.sha256((folder / "merged/model.safetensors").read_bytes()).hexdigest() == listed.sha256
    base = load_file(daemon.model_folder / "model.safetensors")
    assert await merged(daemon, ada, source, dtype="source"), "fp16 is not the base's own format"
    assert dtypes_in(folder) == {tensor.dtype for tensor in base.values()}


async def test_what_a_daemon_that_was_killed_while_it_merged_has_left_is_removed(
    daemon: DaemonParts, ada: Principal
) -> None:
    source = await source_of(daemon, ada)
    folder = daemon.services.jobs.folders.checkpoints(source.job_id).of_step(3)
    for name in ("merged", "merged.new", ".merged.new.partial"):  # before it was listed, replaced, complete
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(b"x" * 1000)
    remove_cut_merges(daemon.services.jobs.folders)
    assert not list(folder.glob("*merged*")) and is_complete(folder)
    await merged(daemon, ada, source, dtype="bf16")
    (folder / "merged.new").mkdir()
    there = what_is_there(folder / "merged")
    await daemon.drain()
    daemon.start_queue()  # as when it starts again
    async with asyncio.timeout(240):
        while (folder / "merged.new").exists():  # noqa: ASYNC110  # it does not say when
            await asyncio.sleep(0.01)
    assert what_is_there(folder / "merged") == there and is_complete(folder)


async def test_a_merged_model_stays_until_another_one_is_complete(daemon: DaemonParts, ada: Principal) -> None:
    source = await source_of(daemon, ada)
    checkpoints = daemon.services.jobs.folders.checkpoints(source.job_id)
    await merged(daemon, ada, source, dtype="bf16")
    before, there = checkpoints.manifest(3), what_is_there(checkpoints.of_step(3))

    async with aclosing(daemon.services.merges.merge(ada, source.job_id, 3, dtype="fp32")) as lines:
        await anext(lines)
        assert checkpoints.manifest(3) == before
    assert checkpoints.manifest(3) == before and what_is_there(checkpoints.of_step(3)) == there

    leases = daemon.services.jobs.leases
    with await leases.take(checkpoints, 3), pytest.raises(InUse, match="step 3 is being downloaded"):
        await merged(daemon, ada, source, dtype="fp32")
    assert checkpoints.manifest(3) == before and what_is_there(checkpoints.of_step(3)) == there
    assert await merged(daemon, ada, source, dtype="fp32"), "the download has ended"

    # Only what is more than before counts
    stored = (await daemon.services.merges._quotas.stored_bytes())[ada.name]
    await daemon.allow("user", ada.name, max_stored_bytes=stored)
    assert await merged(daemon, ada, source, dtype="bf16")
    with pytest.raises(QuotaExceeded):
        await daemon.allow("user", ada.name, max_stored_bytes=stored - 10_000)
        await merged(daemon, ada, source, dtype="fp32")
    assert dtypes_in(checkpoints.of_step(3)) == {torch.bfloat16}


@pytest.mark.parametrize(("option", "asked", "has"), [("dtype", "fp16", "bf16"), ("base", "source", "trained")])
async def test_what_was_written_merged_is_not_made_again(
    daemon: DaemonParts, ada: Principal, option: str, asked: str, has: str
) -> None:
    source = await source_of(daemon, ada, "merged", base="int8")
    words = (
        rf"{option} is {asked}, and the checkpoint of step 3 of job \S+ was written merged .* with {option} {has}; "
        rf"leave {option} out"
    )
    with pytest.raises(InvalidSpec, match=words):
        await merged(daemon, ada, source, **{option: asked})
    assert await merged(daemon, ada, source, **{option: has}) == []


@pytest.mark.parametrize("kept_as", ["int8", "nf4"])
async def test_the_node_merges_into_the_base_that_is_asked_for(
    daemon: DaemonParts, ada: Principal, tmp_path: Path, kept_as: str
) -> None:
    source = await source_of(daemon, ada, base=kept_as)
    folder = daemon.services.jobs.folders.checkpoints(source.job_id).of_step(3)
    found, choices = {}, get_args(MergeBase)
    for base in choices:
        await merged(daemon, ada, source, dtype="fp32", base=base)
        origin = read_origin(folder / "merged")
        assert origin.base_sha256 == model_digest(daemon.model_folder)
        assert (origin.base, origin.base_format) == (base, kept_as if base == "trained" else "source")
        found[base] = load_file(folder / "merged/model.safetensors")
        assert await merged(daemon, ada, source, base=base) == [], "the same is not made again"
        assert await merged(daemon, ada, source) == [], "what is not asked for is as it is there"
    # As the worker of such a job exports it, which multiplies with torch; what has no adapter has the same bits.
    for base in choices:
        whole = tmp_path / base
        write_adapter_checkpoint(whole, daemon.model_folder, export="both", base=kept_as, merge_base=base, dtype="fp32")
        worker = load_file(whole / "merged/model.safetensors")
        for name, tensor in worker.items():
            assert (found[base][name] - tensor).abs().max() <= 1e-6, name
            if "q_proj" not in name and "down_proj" not in name:
                assert torch.equal(found[base][name], tensor), name
    assert not torch.equal(*(found[base]["model.layers.0.mlp.up_proj.weight"] for base in choices))
    assert torch.equal(*(found[base]["model.embed_tokens.weight"] for base in choices))


@pytest.mark.parametrize(("in_spec", "base_format"), [("trained", "int8"), ("source", "source")])
async def test_where_nothing_is_asked_the_job_says_what_to_merge_into(
    daemon: DaemonParts, ada: Principal, in_spec: MergeBase, base_format: str
) -> None:
    source = await source_of(daemon, ada, base="int8", checkpoint={"merge_base": in_spec})
    await merged(daemon, ada, source)
    folder = daemon.services.jobs.folders.checkpoints(source.job_id).of_step(3)
    origin = read_origin(folder / "merged")
    assert origin.base_format == base_format


@pytest.mark.parametrize(("kept_as", "export"), [("nf4", "both"), ("source", "both"), *further(("int8", "merged"))])
async def test_a_base_in_fewer_bits_answers_as_it_was_trained_on(
    daemon: DaemonParts, ada: Principal, kept_as: str, export: Export
) -> None:
    source = await source_of(daemon, ada, export, base=kept_as)
    samples, prompts = daemon.services.samples, [SamplePrompt(text="The lab box")]

    async def weights() -> str:
        answers = samples.sample(ada, source.job_id, 3, prompts, SampleOptions(max_tokens=2))
        *_, figures = [piece async for piece in answers]
        assert isinstance(figures, SampleFigures) and figures.num_tokens
        return figures.weights

    name, gone = source.spec.model, daemon.model_folder.with_name("gone")
    if kept_as == "source":
        assert await weights() == "the merged model of the checkpoint"
        return
    assert await weights() == f"{name} in {kept_as}, as the adapter was trained on it, with the adapter"
    daemon.model_folder.rename(gone)
    try:
        wanted = f"the merged model of the checkpoint, because {name} is not on the node any more"
        assert await weights() == wanted
    finally:
        gone.rename(daemon.model_folder)


async def test_a_merge_takes_of_the_owners_storage_quota(daemon: DaemonParts, ada: Principal) -> None:
    source = await source_of(daemon, ada)
    checkpoints = daemon.services.jobs.folders.checkpoints(source.job_id)
    before, there = checkpoints.manifest(3), what_is_there(checkpoints.of_step(3))
    stored = (await daemon.services.merges._quotas.stored_bytes())[ada.name]
    needed = merged_bytes(daemon.model_folder, "source")

    for holder in ("user", "project"):
        name = ada.name if holder == "user" else ada.project
        await daemon.allow(holder, name, max_stored_bytes=stored + needed - 1)
        for caller in (ada, ROOT):
            with pytest.raises(
                QuotaExceeded, match=rf"quota: .* stored by {holder} {name} \(--max-stored\), and this needs .* more"
            ):
                await merged(daemon, caller, source)
        assert checkpoints.manifest(3) == before and what_is_there(checkpoints.of_step(3)) == there
        await daemon.allow(holder, name, max_stored_bytes=stored + needed)
    assert await merged(daemon, ada, source)
    used = (await daemon.services.merges._quotas.stored_bytes())[ada.name]
    assert stored < used == stored + checkpoints.manifest(3).size_bytes - before.size_bytes <= stored + needed


async def test_a_merge_that_no_longer_fits_when_it_is_done_leaves_nothing(daemon: DaemonParts, ada: Principal) -> None:
    source = await source_of(daemon, ada)
    checkpoints = daemon.services.jobs.folders.checkpoints(source.job_id)
    before, there = checkpoints.manifest(3), what_is_there(checkpoints.of_step(3))
    async with aclosing(daemon.services.merges.merge(ada, source.job_id, 3)) as lines:
        with pytest.raises(QuotaExceeded):
            async for line in lines:
                assert isinstance(line, MergeProgress)
                await daemon.allow("user", ada.name, max_stored_bytes=1)  # as if something else had been stored
    assert checkpoints.manifest(3) == before and what_is_there(checkpoints.of_step(3)) == there


async def test_a_merge_leaves_the_disk_its_free_space(daemon: DaemonParts, ada: Principal) -> None:
    source = await source_of(daemon, ada)
    checkpoints = daemon.services.jobs.folders.checkpoints(source.job_id)
    before, there = checkpoints.manifest(3), what_is_there(checkpoints.of_step(3))
    daemon.services.jobs.folders.min_free_bytes = 2**60
    with pytest.raises(DiskFull, match=r"merged of the checkpoint needs \d+ bytes, but its disk has 0 free besides"):
        await merged(daemon, ada, source)
    assert checkpoints.manifest(3) == before and what_is_there(checkpoints.of_step(3)) == there


async def test_a_merge_whose_caller_hangs_up_leaves_nothing(daemon: DaemonParts, ada: Principal) -> None:
    source = await source_of(daemon, ada)
    checkpoints = daemon.services.jobs.folders.checkpoints(source.job_id)
    before, there = checkpoints.manifest(3), what_is_there(checkpoints.of_step(3))
    begun = asyncio.Event()

    async def merge() -> None:
        async with aclosing(daemon.services.merges.merge(ada, source.job_id, 3)) as lines:
            await anext(lines)
            # What a child that is killed has written so far.
            (checkpoints.of_step(3) / ".merged.partial").mkdir(exist_ok=True)
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(merge(), name="merge")
    await asyncio.wait_for(begun.wait(), 240)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert checkpoints.manifest(3) == before and what_is_there(checkpoints.of_step(3)) == there
    assert await merged(daemon, ada, source)


async def test_a_merge_that_was_cut_is_done_again(daemon: DaemonParts, ada: Principal) -> None:
    source = await source_of(daemon, ada)
    folder = daemon.services.jobs.folders.checkpoints(source.job_id).of_step(3)
    (folder / "merged").mkdir()
    (folder / ".merged.partial").mkdir()
    assert await merged(daemon, ada, source)
    assert is_complete(folder) and not (folder / ".merged.partial").exists()
    tensors = load_file(folder / "merged/model.safetensors")
    base = load_file(daemon.model_folder / "model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], tensors[name])}
    assert changed == {name for name in base if "q_proj" in name or "down_proj" in name}


async def test_what_cannot_be_merged_is_refused(daemon: DaemonParts, ada: Principal, tmp_path: Path) -> None:
    source = await source_of(daemon, ada, "merged")
    with pytest.raises(InvalidSpec, match=r"was written merged \(checkpoint\.export\)"):
        await merged(daemon, ada, source, remove=True)
    with pytest.raises(InvalidSpec, match="dtype is int3; it must be one of source, bf16, fp16, fp32"):
        await merged(daemon, ada, source, dtype="int3")
    full = await daemon.job_in(JobState.SUCCEEDED, ada, name="full")
    daemon.write_checkpoint(full, 3, {"config.json": b"{}"})
    with pytest.raises(InvalidSpec, match="holds a whole model, not an adapter; pull it as it is"):
        await merged(daemon, ada, full)
    eve = await daemon.user("eve")
    with pytest.raises(NotFound):
        await merged(daemon, eve, source)
    viewer = Principal(name=ada.name, role="viewer", project=ada.project)
    with pytest.raises(NotAllowed):
        await merged(daemon, viewer, source)


async def test_another_base_is_not_merged(daemon: DaemonParts, ada: Principal, tmp_path: Path) -> None:
    record = await daemon.model(ada, "tiny")
    job = await daemon.job_in(JobState.SUCCEEDED, ada, name="first", model="tiny", train=LORA)
    checkpoints = daemon.services.jobs.folders.checkpoints(job.job_id)
    write_adapter_checkpoint(checkpoints.of_step(3), daemon.model_folder)
    base = daemon.services.models.folder(record.model_id) / "config.json"
    content = base.read_text()
    base.unlink()
    base.write_text(json.dumps(json.loads(content) | {"rms_norm_eps": 0.5}))
    with pytest.raises(
        InvalidModel, match="the model tiny is not the one that the checkpoint's adapter was trained on"
    ):
        await merged(daemon, ada, job)
    assert not (checkpoints.of_step(3) / "merged").exists()
    await daemon.services.models.delete(ada, record.model_id)
    with pytest.raises(NotFound, match=r"the model tiny that the adapter of job .* is for is not on the node any more"):
        await merged(daemon, ada, job)


async def test_the_base_of_adapters_that_are_kept_is_not_swept(daemon: DaemonParts, ada: Principal) -> None:
    source = await daemon.job_in(JobState.SUCCEEDED, ada, name="full")
    files = {path.name: path.read_bytes() for path in daemon.model_folder.iterdir()}
    daemon.write_checkpoint(source, 3, files)
    job = await daemon.job_in(JobState.SUCCEEDED, ada, name="first", init_from="full@last", train=LORA)
    folders = daemon.services.jobs.folders
    base = folders.start(job.job_id)
    write_adapter_checkpoint(folders.checkpoints(job.job_id).of_step(3), base)
    await sweep(daemon.parts)
    assert base.is_dir()
    assert await merged(daemon, ada, job)


async def test_messages_about_a_job_name_its_inputs_and_no_file_of_the_state_folder(
    daemon: DaemonParts, ada: Principal
) -> None:
    await source_of(daemon, ada)
    job = await daemon.submit(ada, "second", init_from="first@last", train=LORA)
    folders = daemon.services.jobs.folders
    checkpoint = folders.checkpoints(job.job_id).of_step(8)
    words = {
        InvalidModel(": lora_A holds NaN", file=folders.start(job.job_id) / "adapter_model.safetensors"): (
            "adapter_model.safetensors of init_from (first@last): lora_A holds NaN"
        ),
        InvalidModel("holds no tokenizer", file=folders.state_dir / "models" / job.model_id): (
            f"the model {job.spec.model} holds no tokenizer"
        ),
        InvalidModel("is truncated", file=checkpoint / "trainer" / "lo.safetensors"): (
            "trainer/lo.safetensors of the checkpoint of step 8 is truncated"
        ),
        DiskFull("needs 9 bytes", file=checkpoint): "the checkpoint of step 8 needs 9 bytes",
    }
    assert {error: folders.named(job, error).message for error in words} == words
