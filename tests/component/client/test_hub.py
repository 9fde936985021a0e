"""The client and the Hugging Face hub: results are published there, and jobs of its models are planned from their
config, through the daemon itself."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import Result
from tests.support.hub import Repository, StandInHub, used_hub

from horizon_client import Client
from horizon_client.errors import BadConfig, InvalidRequest, NotAllowed, NotFound, TooLarge
from horizon_client.job_spec_types import JobSpec
from horizon_server.records.job import JobRecord

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

# Of the hub's library, about the HTTP library that it has chosen itself.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

Run = Callable[..., Result]
WEIGHTS = bytes(range(256)) * 100
FILES = {
    "model.safetensors": WEIGHTS,
    "config.json": b"{}",
    "README.md": b"---\nlicense: mit\n---\n# Tuned\n",
    "job.yaml": b"name: tuned\n",
    "answers.jsonl": b'{"prompt": "of my data"}\n',
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandInHub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    with used_hub(monkeypatch, tmp_path / "hub-cache") as hub:
        yield hub


@pytest.fixture
def job(daemon: Daemon, finished_job: JobRecord) -> str:
    daemon.add_checkpoint(finished_job, 10, FILES, eval_loss=1.0)
    return finished_job.job_id


def test_a_checkpoint_is_published_with_its_card_and_without_texts_of_the_data(
    client: Client, job: str, hub: StandInHub, tmp_path: Path
) -> None:
    pushed = client.checkpoints.push(job, "hf:lab/tuned", at="best", private=True)
    assert pushed.repo == "lab/tuned" and pushed.url.startswith(f"{hub.url}/lab/tuned/commit/")
    made = hub.repositories["lab/tuned"]
    assert made.private
    assert made.files == {name: content for name, content in FILES.items() if name != "answers.jsonl"}
    assert not list((tmp_path / "user-cache" / "horizon" / "push").glob("*"))
    # Once more, from a folder that stays, with all that there is.
    client.checkpoints.push(f"{job}@10", "hf:lab/tuned", folder=tmp_path / "kept", with_answers=True)
    assert made.files == FILES and (tmp_path / "kept" / "model.safetensors").read_bytes() == WEIGHTS


def test_a_push_that_was_cut_sends_what_is_missing(client: Client, job: str, hub: StandInHub, tmp_path: Path) -> None:
    hub.refused_commits = 1
    with pytest.raises(NotAllowed, match=r"does not let you use lab/tuned \(403\): log in with a token"):
        client.checkpoints.push(job, "hf:lab/tuned", folder=tmp_path / "kept")
    assert list(hub.uploaded.values()) == [WEIGHTS]
    client.checkpoints.push(job, "hf:lab/tuned", folder=tmp_path / "kept")
    assert hub.repositories["lab/tuned"].files["model.safetensors"] == WEIGHTS
    assert hub.num_uploads == 1


def test_the_command_says_where_the_result_is_and_what_is_wrong(
    run: Run, job: str, hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret\n")
    result = run("checkpoint", "push", f"{job}@10", "hf:lab/tuned", "--hub-token-file", str(token), "-o", "name")
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert result.stdout == f"{hub.url}/lab/tuned/commit/{'2' * 40}\n"
    assert hub.tokens == {"hf_secret"}
    wrong = run("checkpoint", "push", job, "lab/tuned")
    assert wrong.exit_code == 2 and "write hf:ORG/NAME" in wrong.stderr
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    missing = run("checkpoint", "push", job, "hf:lab/tuned")
    assert missing.exit_code == 2 and "pip install 'horizon-train[hub]'" in missing.stderr


def test_a_job_is_planned_from_config_json_alone_here_or_on_the_hub(
    client: Client, daemon: Daemon, hub: StandInHub, model_folder: Path, tmp_path: Path
) -> None:
    spec: JobSpec = {"name": "p", "model": "tiny-base", "dataset": "gsm8k", "train": {"max_steps": 3}}
    of_weights = client.jobs.plan(spec).plan
    alone = tmp_path / "config-alone"
    alone.mkdir()
    shutil.copy(model_folder / "config.json", alone)
    planned = client.jobs.plan({**spec, "model": str(alone), "dataset": "not-there-yet"})
    assert planned.plan.num_parameters == of_weights.num_parameters == 2_623_424
    assert planned.plan.host_bytes == of_weights.host_bytes
    assert "FinalizeModel" not in daemon.calls
    # A model of the hub that the node does not have; then one that nobody has.
    hub.repositories["lab/tiny"] = Repository(files={"config.json": (model_folder / "config.json").read_bytes()})
    elsewhere = client.jobs.plan_elsewhere({**spec, "model": "lab/tiny"}, gpu="h100", host_gbps=200)
    assert elsewhere.plan.num_parameters == of_weights.num_parameters
    with pytest.raises(NotFound, match="the hub has no lab/absent"):
        client.jobs.plan({**spec, "model": "lab/absent"})
    # A submission names what an administrator has to run.
    with pytest.raises(NotFound, match="horizond model add lab/tiny"):
        client.jobs.submit({**spec, "model": "lab/tiny"})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "only decoder-only language models"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}, r"names custom code \(auto_map\)"),
        ({"model_type": "llama", "hidden_size": "wide"}, "is not the config of a llama model"),
    ],
)
def test_a_config_that_is_none_of_a_decoder_is_refused(
    client: Client, tmp_path: Path, config: dict[str, object], why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match=why):
        client.jobs.plan({"name": "p", "model": str(tmp_path), "dataset": "gsm8k"})


def test_a_config_beyond_its_limit_is_refused(client: Client, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "_": "x" * (1 << 20)}))
    with pytest.raises(TooLarge, match=r"config\.json has 10486.. bytes; at most 1048576 are planned from"):
        client.jobs.plan({"name": "p", "model": str(tmp_path), "dataset": "gsm8k"})


def test_of_a_gated_repository_the_message_says_how_to_log_in(client: Client, hub: StandInHub) -> None:
    hub.repositories["lab/gated"] = Repository(files={}, gated_status=HTTPStatus.FORBIDDEN)
    with pytest.raises(NotAllowed, match=r"gated: accept its terms .* hf auth login"):
        client.jobs.plan({"name": "p", "model": "lab/gated", "dataset": "gsm8k"})


def test_without_the_extra_the_plan_of_a_model_of_the_hub_names_both_ways(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(NotFound, match=r"horizond model add lab/tiny.*pip install 'horizon-train\[hub\]'"):
        client.jobs.plan({"name": "p", "model": "lab/tiny", "dataset": "gsm8k"})
    with pytest.raises(BadConfig, match="pip install"):
        client.checkpoints.push("job", "hf:lab/tuned")
