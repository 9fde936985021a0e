"""Model folders that cannot be trained: refused on the laptop before a byte is sent, and on the node when nobody
checked before."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.faults.raw_calls import RawCalls, folder_files
from tests.support.node import Node, Shell

from horizon_client.job_spec_types import JobSpec, TrainSpec

WEIGHTS = "model.safetensors"


@pytest.fixture
def raw(node: Node) -> Iterator[RawCalls]:
    calls = RawCalls(node.daemon.endpoints["grpc"], node.token)
    yield calls
    calls.close()


def edited_config(folder: Path, **changes: Any) -> bytes:
    config = json.loads((folder / "config.json").read_text())
    return json.dumps({k: v for k, v in {**config, **changes}.items() if v is not None}).encode()


def edited_header(weights: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return the file with another header over the same data."""
    (size,) = struct.unpack("<Q", weights[:8])
    header = json.loads(weights[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + weights[8 + size :]


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header[new] = header.pop(old)

    return change


def without_last_tensor(weights: bytes) -> tuple[bytes, str]:
    """Return the file without the tensor that its data ends with, and that tensor's name."""
    (size,) = struct.unpack("<Q", weights[:8])
    header = json.loads(weights[8 : 8 + size])
    name = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])
    begin, end = header[name]["data_offsets"]
    shorter = weights[: len(weights) - (end - begin)]
    return edited_header(shorter, lambda h: h.pop(name)), name


def reshaped(name: str) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header[name]["shape"].reverse()

    return change


Change = Callable[[Path], None]
LOCAL: Mapping[str, tuple[Change, str]] = {
    "not-safetensors": (lambda f: _put(f / WEIGHTS, b"PK\x03\x04 a torch archive" * 40), "is not a safetensors file"),
    "truncated": (lambda f: _put(f / WEIGHTS, (f / WEIGHTS).read_bytes()[:-100]), WEIGHTS),
    "empty": (lambda f: _put(f / WEIGHTS, b""), "model.safetensors is empty"),
    "pickle-only": (lambda f: _move(f / WEIGHTS, f / "pytorch_model.bin"), "as pickle only (pytorch_model.bin)"),
    "no-config": (lambda f: (f / "config.json").unlink(), "contains no config.json"),
    "config-not-json": (lambda f: _put(f / "config.json", b'{"a": '), "config.json, line 1: not JSON"),
}


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _move(path: Path, target: Path) -> None:
    path.rename(target)


@pytest.mark.parametrize("case", LOCAL)
def test_the_client_refuses_before_a_byte_is_sent(node: Node, shell: Shell, case: str) -> None:
    change, words = LOCAL[case]
    shutil.copytree(node.model, shell.home / "model")
    change(shell.home / "model")
    sentence = shell.fails(2, "model", "push", "model", "--name", f"local-{case}")
    assert words in sentence
    assert f"local-{case} does not exist" in shell.fails(4, "model", "get", f"local-{case}").replace("'", "")


def _bad_files(node: Node) -> dict[str, tuple[dict[str, bytes], str]]:
    files = folder_files(node.model)
    weights = files[WEIGHTS]
    deep = "model.layers.1.mlp.up_proj.weight"
    return {
        "not-safetensors": ({**files, WEIGHTS: b"\x80\x04 a pickle in disguise" * 40}, WEIGHTS),
        "truncated": ({**files, WEIGHTS: weights[:-100]}, WEIGHTS),
        "pickle": ({**files, "pytorch_model.bin": b"x"}, "pytorch_model.bin may be a pickle"),
        "pickle-only": (
            {k: v for k, v in files.items() if k != WEIGHTS} | {"a.pt": b"x"},
            "a.pt may be a pickle, which can run code",
        ),
        "code": ({**files, "modeling_own.py": b"import os"}, "modeling_own.py is code"),
        "auto-map": (
            {**files, "config.json": edited_config(node.model, auto_map={"AutoModel": "own.Model"})},
            "names custom code (auto_map)",
        ),
        "no-config": ({k: v for k, v in files.items() if k != "config.json"}, "no config.json"),
        "config-not-json": ({**files, "config.json": b"{"}, "config.json is not valid JSON"),
        "no-model-type": ({**files, "config.json": edited_config(node.model, model_type=None)}, "no model_type"),
        "layers": (
            {**files, "config.json": edited_config(node.model, num_hidden_layers=5)},
            "the config says num_hidden_layers = 5",
        ),
        "vocabulary": (
            {**files, "config.json": edited_config(node.model, vocab_size=7)},
            "model.embed_tokens.weight has shape",
        ),
        "encoder": ({**files, "config.json": edited_config(node.model, is_encoder_decoder=True)}, "decoder-only"),
        "int8": (
            {**files, WEIGHTS: edited_header(weights, lambda h: h[deep].update(dtype="I16"))},
            f"{deep} has dtype I16; only BF16, F16 and F32",
        ),
    }


BAD = [
    "not-safetensors",
    "truncated",
    "pickle",
    "pickle-only",
    "code",
    "auto-map",
    "no-config",
    "config-not-json",
    "no-model-type",
    "layers",
    "vocabulary",
    "encoder",
    "int8",
]


def test_an_encoder_is_refused_before_its_weights_are_sent(node: Node, shell: Shell) -> None:
    folder = shell.home / "bert"
    shutil.copytree(node.model, folder, copy_function=shutil.copyfile)
    (folder / "config.json").write_bytes(
        edited_config(node.model, model_type="bert", architectures=["BertForMaskedLM"])
    )
    weights = (folder / WEIGHTS).read_bytes()[:-1] + b"\x7f"
    (folder / WEIGHTS).write_bytes(weights)
    assert "config.json names 'BertForMaskedLM'; only decoder-only" in shell.fails(
        2, "model", "push", "bert", "--name", "bert"
    )
    sent = hashlib.sha256(weights).hexdigest()
    assert not any(sent in path.name for path in node.daemon.state_dir.rglob("*"))


@pytest.mark.parametrize("case", BAD)
def test_the_node_refuses_what_no_client_checked(node: Node, raw: RawCalls, case: str) -> None:
    files, words = _bad_files(node)[case]
    with pytest.raises(grpc.RpcError) as caught:
        raw.push_model(f"raw-{case}", files)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in str(caught.value.details())
    assert str(node.daemon.state_dir) not in str(caught.value.details())
    assert not any(folder.suffix for folder in (node.daemon.state_dir / "models").iterdir())


@pytest.mark.parametrize(
    ("case", "tensor"),
    [
        ("misnamed", "model.layers.1.mlp.up_proj.weight"),
        ("misshaped", "model.layers.2.mlp.gate_proj.weight"),
        ("missing", ""),
    ],
)
def test_a_tensor_that_does_not_fit_the_config_is_named(node: Node, raw: RawCalls, case: str, tensor: str) -> None:
    files = folder_files(node.model)
    if case == "missing":
        files[WEIGHTS], tensor = without_last_tensor(files[WEIGHTS])
    else:
        change = reshaped(tensor) if case == "misshaped" else renamed(tensor, tensor.replace("up_proj", "upp_proj"))
        files[WEIGHTS] = edited_header(files[WEIGHTS], change)
    told = refusal_of(raw, f"tensor-{case}", files)
    assert tensor in told
    assert str(node.daemon.state_dir) not in told


def test_an_architecture_that_nobody_knows_is_named(node: Node, raw: RawCalls) -> None:
    files = folder_files(node.model)
    files["config.json"] = edited_config(node.model, model_type="from-elsewhere")
    told = refusal_of(raw, "unknown", files)
    assert "model_type is 'from-elsewhere', which transformers" in told
    assert str(node.daemon.state_dir) not in told


def refusal_of(raw: RawCalls, name: str, files: dict[str, bytes]) -> str:
    """What the node says when it has tried a model that is pushed: before any job."""
    with pytest.raises(grpc.RpcError) as caught:
        raw.push_model(name, files)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


def test_nan_weights_fail_the_job_and_the_queue_goes_on(node: Node, shell: Shell, raw: RawCalls) -> None:
    files = folder_files(node.model)
    _, broken_tensor = without_last_tensor(files[WEIGHTS])
    weights = bytearray(files[WEIGHTS])
    weights[-2:] = b"\xc0\x7f"  # the last element in bfloat16: not a number
    files[WEIGHTS] = bytes(weights)
    raw.push_model("nan-model", files)
    with node.client() as client:
        small: TrainSpec = {"max_steps": 2, "sequence_length": 64, "tokens_per_step": 128}
        spec: JobSpec = {"name": "nan", "model": "nan-model", "dataset": "demo-chats", "train": small}
        broken = client.jobs.submit(spec)
        good = client.jobs.submit({**spec, "name": "after-nan", "model": "demo-model"})
    done = shell.run("job", "watch", broken.job_id)
    assert done.returncode == 1
    assert f"{broken_tensor} holds NaN or infinite values" in done.stdout.splitlines()[-1]
    assert "last lines of the log" in done.stdout
    assert "Traceback" in shell.works("job", "logs", broken.job_id)
    assert "SUCCEEDED" in shell.works("job", "watch", good.job_id).splitlines()[-1]


def test_a_job_that_only_skips_steps_fails_after_as_many_as_the_spec_allows(
    node: Node, shell: Shell, raw: RawCalls
) -> None:
    files = folder_files(node.model)
    weights = files[WEIGHTS]
    (header_bytes,) = struct.unpack("<Q", weights[:8])
    start = 8 + header_bytes
    files[WEIGHTS] = weights[:start] + b"\x7f\x7f" * ((len(weights) - start) // 2)  # the largest finite bfloat16
    raw.push_model("huge-model", files)
    train: TrainSpec = {"max_steps": 9, "sequence_length": 64, "tokens_per_step": 128, "max_skipped_steps": 2}
    with node.client() as client:
        job = client.jobs.submit({"name": "huge", "model": "huge-model", "dataset": "demo-chats", "train": train})
        done = shell.run("job", "watch", job.job_id)
        ended = client.jobs.get(job.job_id)
    assert done.returncode == 1
    assert ended.reason == "DIVERGED"
    assert "2 steps in a row were skipped up to step 2" in ended.message
