"""After training on a base in fewer bits: answers are those of the job's evaluations, and merged models compute what
they are said to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests.support.scripted_calls import answered, ask
from tests.support.worker_attempts import Daemon, always, attempt, spec_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareRequest
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.demo.recipe import demo_chats, write_demo_model
from horizon_server.engine.data import PreparedDataset
from horizon_server.engine.generation import generator
from horizon_server.engine.generation.choosing import choose
from horizon_server.events import EvalDone
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.sample import SampleAdapter, SampleModel, SamplePrompt
from horizon_server.spec import JobSpec
from horizon_server.store import merging
from horizon_server.store.adapter_files import read_adapter_folder
from horizon_server.store.adapter_load import rounding_of
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import Packing
from horizon_server.store.manifest import read_manifest
from horizon_server.store.merging import MergeOrigin, read_origin, write_merged
from horizon_server.store.model_load import load_model
from horizon_server.worker import sampling

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

LENGTH, NUM_STEPS, NUM_NEW = 64, 4, 8
PACKED = ["int8", "nf4"]
IDS = torch.arange(36).reshape(3, 12) * 7 % 250


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and data that is prepared for it."""
    folder = tmp_path_factory.mktemp("source")
    write_demo_model(folder / "model")
    lines = [json.dumps({"messages": list(chat)}) + "\n" for chat in demo_chats()[:40]]
    (folder / "chats.jsonl").write_text("".join(lines), "utf-8")
    request = PrepareRequest(
        dataset_files=(StoredFile(path=folder / "chats.jsonl", name="chats.jsonl"),),
        model_dir=folder / "model",
        output_dir=folder / "prepared",
        options=PrepareOptions(sequence_length=LENGTH),
    )
    prepare(request, on_progress=lambda rows: None)
    return folder


@pytest.fixture
def job(source: Path, tmp_path: Path) -> Path:
    for part in ("model", "prepared"):
        (tmp_path / part).symlink_to(source / part)
    return tmp_path


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of every token that a generator chooses."""
    found: list[Tensor] = []

    def choose_and_keep(logits_CV: Tensor, choices: Any) -> Any:
        found.append(logits_CV.clone())
        return choose(logits_CV, choices)

    monkeypatch.setattr(generator, "choose", choose_and_keep)
    return found


def job_spec(base: str, merge_base: str = "trained") -> JobSpec:
    lora = {"rank": 4, "alpha": 16, "base": base}
    train = {
        "trainable": "lora",
        "lora": lora,
        "learning_rate": 0.003,
        "warmup_steps": 0,
        "sequence_length": LENGTH,
        "tokens_per_step": 128,
        "compile": "off",
    }
    spec: JobSpec = spec_of(
        NUM_STEPS,
        train=train,
        eval_every_steps=NUM_STEPS,
        eval={"sets": {"chats": "d"}, "generate": {"set": "chats", "prompts": 6, "max_new_tokens": NUM_NEW}},
        checkpoint={"every_steps": NUM_STEPS, "export": "both", "dtype": "fp32", "merge_base": merge_base},
    )
    return spec


def trained(job: Path, spec: JobSpec) -> tuple[Path, EvalDone]:
    """Run a job to its end; returns its checkpoint and the evaluation of the same step."""
    daemon = Daemon(always)
    assert attempt(job, spec, daemon, evaluations={"chats": str(job / "prepared")}).outcome == "succeeded"
    return job / f"checkpoints/step-{NUM_STEPS:08d}", daemon.said(EvalDone)[-1]


def sampled(job: Path, checkpoint: Path, spec: JobSpec | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a checkpoint answers to the prompts of the evaluation: next to the base as `spec` keeps it, or merged into
    the folder's."""
    prompts = [prompt.ids for prompt in PreparedDataset.open(job / "prepared").prompts(shorter_than=LENGTH)][:6]
    monkeypatch.setattr(sampling, "encoded", lambda codec, index, prompt: list(prompts[index]))
    base = read_manifest(checkpoint).base
    assert base is not None
    adapter = SampleAdapter(folder=checkpoint, base_sha256=base.sha256, digests=job / "digests", spec=spec)
    model = SampleModel(folder=job / "model", num_threads=1, cache_bytes=2**30, adapter=adapter)
    pipe = answered(model, [ask(1, *(SamplePrompt(text="any") for _ in prompts), max_tokens=NUM_NEW)])
    assert pipe.figures(1).num_tokens
    return [pipe.text(1, prompt) for prompt in range(len(prompts))]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(IDS).logits
    return found


def of_store(job: Path, spec: JobSpec, checkpoint: Path) -> dict[str, Tensor]:
    """What the layers' weights are in training: the base as it is kept, without adapters."""
    layout = open_for_training(job / "model", spec.train).layout
    store = HostStore.allocate(layout, num_threads=1)
    names = {place.name for _, place in layout.tensors() if place.adapts}
    load_model(store, job / "model", adapters=read_adapter_folder(checkpoint).tensors(names))
    weights = {}
    for unit in layout.units:
        flat = torch.empty(unit.num_elements)
        store.merge_master(unit.index, flat)
        for place in unit.tensors:
            weights[place.name] = flat[place.offset : place.offset + place.num_elements].view(place.shape).clone()
    store.close()
    return weights


@pytest.mark.parametrize("base", PACKED)
def test_a_checkpoint_answers_with_the_bits_of_the_jobs_own_evaluation(
    base: str, job: Path, seen: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job_spec(base)
    checkpoint, evaluation = trained(job, spec)
    of_job = seen.copy()
    seen.clear()
    texts = sampled(job, checkpoint, spec, monkeypatch)
    assert texts == [answer.answer for answer in evaluation.answers]
    # The last evaluation's: those before it were of other weights.
    wanted = of_job[-len(seen) :]
    assert len(wanted) == NUM_NEW
    assert all(torch.equal(one, other) for one, other in zip(seen, wanted, strict=True))

    seen.clear()
    sampled(job, checkpoint, None, monkeypatch)
    assert not torch.equal(seen[0], wanted[0]), "the model folder's own weights answer otherwise"


@pytest.mark.parametrize("base", PACKED)
def test_a_merged_model_is_the_one_that_was_evaluated(base: str, job: Path) -> None:
    spec = job_spec(base)
    checkpoint, evaluation = trained(job, spec)
    origin = read_origin(checkpoint / "merged")
    assert origin is not None and (origin.base, origin.base_format) == ("trained", base)

    weights = of_store(job, spec, checkpoint)
    unmerged: Any = AutoModelForCausalLM.from_pretrained(job / "model", dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in unmerged.state_dict().items():
            if name in weights:
                tensor.copy_(weights[name])
    wanted = logits(PeftModel.from_pretrained(unmerged, str(checkpoint)))
    merged: Any = AutoModelForCausalLM.from_pretrained(checkpoint / "merged")
    assert (logits(merged) - wanted).abs().max() <= 1e-5

    source: Any = AutoModelForCausalLM.from_pretrained(job / "model", dtype=torch.float32)
    of_source = logits(PeftModel.from_pretrained(source, str(checkpoint)))
    assert (of_source - wanted).abs().max() > 1e-3, "the folder's own weights are another model"
    # And greedy answers of transformers from the merged folder are those that the evaluation has shown.
    dataset = PreparedDataset.open(job / "prepared")
    for answer, prompt in zip(evaluation.answers, dataset.prompts(shorter_than=LENGTH), strict=False):
        ids = torch.tensor([prompt.ids])
        output = merged.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False
        )
        decode = TextCodec.from_folder(job / "model").tokenizer.decode
        assert decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=True) == answer.answer


@pytest.mark.parametrize("base", PACKED)
def test_merged_into_the_source_it_is_what_peft_merges(base: str, job: Path) -> None:
    checkpoint, _ = trained(job, job_spec(base, merge_base="source"))
    origin = read_origin(checkpoint / "merged")
    assert origin is not None and (origin.base, origin.base_format) == ("source", "source")
    plain: Any = AutoModelForCausalLM.from_pretrained(job / "model", dtype=torch.float32)
    wanted = PeftModel.from_pretrained(plain, str(checkpoint)).merge_and_unload()
    merged: Any = AutoModelForCausalLM.from_pretrained(checkpoint / "merged")
    assert (logits(merged) - logits(wanted)).abs().max() <= 1e-5
    for name, tensor in wanted.state_dict().items():
        assert (merged.state_dict()[name] - tensor).abs().max() <= 1e-6, name


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A model some of whose matrices have several groups of scales, in rows that no group ends with."""
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(
        "llama",
        vocab_size=32,
        hidden_size=96,
        intermediate_size=600,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


def write_zero_adapter(folder: Path) -> Path:
    """Write an adapter that changes nothing."""
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": torch.zeros(2, 96), f"{name}.lora_B.weight": torch.zeros(96, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("piece", [1, 1 << 18])
def test_pieces_are_rounded_as_the_whole_tensor_is(
    kind: Packing, piece: int, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "_PIECE_ELEMENTS", piece)
    spec = spec_of(train={"trainable": "lora", "lora": {"targets": ["q_proj"], "rank": 2, "base": kind}})
    layout = open_for_training(wide, spec.train).layout
    packed = {place.name: place.packing for _, place in layout.tensors()}
    adapter = read_adapter_folder(write_zero_adapter(tmp_path / "adapter"))
    (tmp_path / "merged").mkdir()
    origin = MergeOrigin(base_model="wide", base_sha256="0" * 64, base="trained", base_format=kind)
    write_merged(
        tmp_path / "merged", base=wide, adapter=adapter, dtype="fp32", rounding=rounding_of(packed), origin=origin
    )
    found = load_file(tmp_path / "merged/model.safetensors")
    store = HostStore.allocate(layout, num_threads=1)
    load_model(store, wide)
    for unit in layout.units:
        flat = torch.empty(unit.num_elements)
        store.merge_master(unit.index, flat)
        for place in unit.tensors:
            if not place.adapts:
                wanted = flat[place.offset : place.offset + place.num_elements]
                assert torch.equal(found[place.name].view(-1), wanted), place.name
    store.close()
    assert read_origin(tmp_path / "merged") == origin


def test_a_base_that_was_trained_on_as_it_is_is_not_rounded() -> None:
    assert rounding_of({"a": "none"}) is None
    rounding = rounding_of({"a": "none", "b": "int8"})
    assert rounding is not None and set(rounding.packing_of) == {"b"}
    rows: Callable[..., Any] = rounding.round_rows
    values = np.full((2, 16), 0.3, dtype=np.float32)
    rows(values, "int8")
    assert np.unique(values).size == 1 and values[0, 0] != np.float32(0.3)
