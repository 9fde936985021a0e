"""What is taken from a model hub, what is refused, and what a kill, a wrong hash or a lack of network does, against a
hub on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download
from tests.support.hub import Repository, StandInHub, used_hub

from horizon_server.errors import InvalidModel, InvalidSpec, IoFailed, NotAllowed, NotFound
from horizon_server.hub import fetch_model, find_model, write_model_outline
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.store.model_card import SOURCE_FILE, base_facts

REPO = "lab/tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandInHub]:
    with used_hub(monkeypatch, tmp_path / "cache") as hub:
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
    base = base_facts(tmp_path / "here", "named otherwise")
    assert (base.repo, base.commit, base.licence) == (REPO, repository.commit, {"license": "apache-2.0"})


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


def test_a_transfer_that_is_killed_continues_where_it_was(hub: StandInHub, model_folder: Path, tmp_path: Path) -> None:
    hub.add_folder(REPO, model_folder).hold_at = 1 << 21
    program = (
        "import sys; from pathlib import Path; from horizon_server.hub import fetch_model, find_model; "
        f"fetch_model(find_model({REPO!r}, None), Path(sys.argv[1]))"
    )
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "here"], env={**os.environ, **variables}, stderr=subprocess.DEVNULL
    ) as child:
        assert hub.holds.wait(300)
        arrived = tmp_path / "here" / "model.safetensors.partial"
        while arrived.stat().st_size < 1 << 20:
            assert child.poll() is None
        child.kill()
    fetch_model(find_model(REPO, None), tmp_path / "here")
    assert hub.resumed_at and hub.resumed_at[0] >= 1 << 20
    weights = "model.safetensors"
    assert (tmp_path / "here" / weights).read_bytes() == (model_folder / weights).read_bytes()


def test_a_file_that_is_not_what_the_hub_announces_is_removed_and_named(
    hub: StandInHub, model_folder: Path, tmp_path: Path
) -> None:
    repository = hub.add_folder(REPO, model_folder)
    repository.announced["model.safetensors"] = "0" * 64
    with pytest.raises(InvalidModel, match=r"model.safetensors of lab/tiny has the sha256 .* the hub announces 0000"):
        fetch_model(find_model(REPO, None), tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    # Small files have git's hash.
    repository.announced.clear()
    model = find_model(REPO, None)
    repository.files["tokenizer.json"] = repository.files["tokenizer.json"].replace(b"{", b"[", 1)
    with pytest.raises(InvalidModel, match=r"tokenizer\.json of lab/tiny has the git hash"):
        fetch_model(model, tmp_path / "other")


def test_what_is_no_safetensors_model_is_refused_by_its_names(hub: StandInHub) -> None:
    for names, why in (
        (["config.json", "pytorch_model.bin"], r"has only pickles \(.bin\)"),
        (["config.json", "tf_model.h5"], "has none"),
        (["model.safetensors"], "no config.json"),
        (["adapter_config.json", "adapter_model.safetensors"], "is an adapter"),
    ):
        hub.repositories[REPO] = Repository(files=dict.fromkeys(names, b"{}"))
        with pytest.raises(InvalidModel, match=why):
            find_model(REPO, None)


@pytest.mark.parametrize("status", [HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN])
def test_of_a_gated_model_the_message_says_how_to_give_a_token(hub: StandInHub, status: HTTPStatus) -> None:
    hub.repositories[REPO] = Repository(files={}, gated_status=status)
    with pytest.raises(NotAllowed, match=r"gated: accept its terms on .*hf auth login, or HF_TOKEN"):
        find_model(REPO, None)


@pytest.mark.parametrize("commit", ["../../../etc", "", "main", "1" * 41])
def test_a_hub_that_names_no_commit_is_refused(hub: StandInHub, model_folder: Path, commit: str) -> None:
    hub.add_folder(REPO, model_folder)
    hub.repositories[REPO].announced_commit = commit
    with pytest.raises(InvalidModel, match="which no repository is"):
        find_model(REPO, None)


def test_an_unknown_model_revision_or_id_is_named(hub: StandInHub, model_folder: Path) -> None:
    hub.add_folder(REPO, model_folder)
    with pytest.raises(NotFound, match="has no revision v9"):
        find_model(REPO, "v9")
    with pytest.raises(NotFound, match="the hub has no model lab/absent"):
        find_model("lab/absent", None)
    with pytest.raises(InvalidSpec, match="is not the id of a model"):
        find_model("lab/--tiny--", None)


def test_without_a_network_a_model_that_is_whole_in_the_cache_is_taken_from_there(
    hub: StandInHub, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub.add_folder(REPO, model_folder)
    snapshot = Path(snapshot_download(REPO, cache_dir=constants.HF_HUB_CACHE))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = find_model(REPO, None)
    assert (model.commit, model.snapshot) == (repository.commit, snapshot)
    assert write_model_outline(model, tmp_path / "outline") == snapshot
    fetched = {file.path: file.sha256 for file in fetch_model(model, tmp_path / "here")}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    online = {file.path: file.sha256 for file in fetch_model(find_model(REPO, None), tmp_path / "again")}
    assert {**fetched, SOURCE_FILE: ""} == {**online, SOURCE_FILE: ""}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"the hub does not answer .* and model.safetensors of lab/tiny is not in this"):
        find_model(REPO, None)


def test_a_hub_that_stops_answering_leaves_what_has_arrived(
    hub: StandInHub, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_folder(REPO, model_folder)
    model = find_model(REPO, None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(IoFailed, match="the same command continues from there"):
        fetch_model(model, tmp_path)
