"""What is taken from a model hub, what is refused, and what a cut, a wrong hash or a lack of network does, against a hub
on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download
from tests.support.hub import StandInHub, served_hub

from horizon_server.errors import InvalidModel, InvalidSpec, IoFailed, NotAllowed, NotFound
from horizon_server.hub import SOURCE_FILE, fetch_model, find_model, read_source, write_model_outline
from horizon_server.planning.model_folder import open_model_folder

REPO = "lab/tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandInHub]:
    with served_hub() as hub:
        for name, value in {
            "ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
            # What has arrived is written in such pieces.
            "DOWNLOAD_CHUNK_SIZE": 1 << 16,
        }.items():
            monkeypatch.setattr(constants, name, value)
        yield hub


def test_only_config_tokenizer_texts_and_the_models_own_safetensors_are_taken(
    hub: StandInHub, model_folder: Path, tmp_path: Path
) -> None:
    repository = hub.add_folder(REPO, model_folder)
    for extra in ("pytorch_model.bin", "modeling_tiny.py", "consolidated.safetensors", "onnx/model.onnx", "notes.docx"):
        repository.files[extra] = repository.files.get("model.safetensors", b"") if "safe" in extra else b"\x80"
    repository.files["README.md"] = b"# Tiny"
    model = find_model(REPO, None)
    assert (model.commit, model.licence) == (repository.commit, "apache-2.0")
    files = fetch_model(model, tmp_path / "here")
    taken = {file.path for file in files}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", SOURCE_FILE} <= taken
    assert not taken & {"pytorch_model.bin", "modeling_tiny.py", "consolidated.safetensors", "notes.docx"}
    for file in files:
        if file.path != SOURCE_FILE:
            assert (tmp_path / "here" / file.path).read_bytes() == repository.files[file.path]
    assert read_source(tmp_path / "here") == {"repo": REPO, "commit": repository.commit, "license": "apache-2.0"}


def test_a_model_is_laid_out_as_its_own_folder_is_before_a_weight_is_fetched(
    hub: StandInHub, model_folder: Path, tmp_path: Path
) -> None:
    hub.add_folder(REPO, model_folder)
    outline = open_model_folder(write_model_outline(find_model(REPO, "main"), tmp_path))
    assert outline.layout == open_model_folder(model_folder).layout
    # The beginning of the file, in which the header is.
    assert hub.sent_bytes["model.safetensors"] <= 2 * 100_001
    weights = tmp_path / "model.safetensors"
    assert weights.stat().st_blocks * 512 < weights.stat().st_size // 10


def test_a_transfer_that_is_cut_continues_where_it_was_cut(
    hub: StandInHub, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_folder(REPO, model_folder).cut_at = 1 << 20
    # The library tries again by itself; this is one that was killed.
    monkeypatch.setattr("huggingface_hub.file_download.http_get", _killed_after_a_cut())
    model = find_model(REPO, None)
    with pytest.raises(KeyboardInterrupt):
        fetch_model(model, tmp_path / "here")
    monkeypatch.undo()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    fetch_model(model, tmp_path / "here")
    assert hub.resumed_at == [1 << 20]
    weights = "model.safetensors"
    assert (tmp_path / "here" / weights).read_bytes() == (model_folder / weights).read_bytes()
