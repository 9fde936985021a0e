"""`horizon checkpoint eval --tasks`: what the program is started with, and what becomes of its results.

A program of the same name stands for lm-evaluation-harness here; tests/component/openai runs the real one where it is
installed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import Result

from horizon_client.cli.harness import Harness, trusting
from horizon_client.errors import BadFile
from horizon_client.profiles import Endpoint
from horizon_server.records.job import JobRecord

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

Run = Callable[..., Result]

PROGRAM = """
import json, os, pathlib, sys

_, *arguments = sys.argv
options = dict(zip(arguments[1::2], arguments[2::2]))
said = pathlib.Path(os.environ["SAID"])
model = dict(one.split("=", 1) for one in options["--model_args"].split(","))
files = sorted(path.name for path in pathlib.Path(model["tokenizer"]).iterdir())
said.write_text(json.dumps({"options": options, "model": model, "key": os.environ["OPENAI_API_KEY"], "files": files}))
print("its own table")
if options["--tasks"] == "broken":
    sys.exit(3)
folder = pathlib.Path(options["--output_path"]) / "a-model"
folder.mkdir(parents=True)
figures = {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.25}
figures |= {"exact_match,strict": 1, "exact_match_stderr,strict": "N/A"}
parts = {f"part_{number}": {"acc,none": 1.0} for number in range(250)}
results = {"many": parts, "none": {"none": {"alias": "none"}}}.get(options["--tasks"], {"arc": figures, **parts})
(folder / "results_2026.json").write_text(json.dumps({
    "results": results,
    "versions": {"arc": 2.0},
    "n-samples": {"arc": {"original": 20, "effective": 4}},
    "lm_eval_version": "0.4.13",
}))
"""


@pytest.fixture
def said(daemon: Daemon, finished_job: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the program, and write a checkpoint of the job `first`. The program says in this file what it was
    given."""
    package = tmp_path / "programs" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("SAID", str(tmp_path / "said.json"))
    files = {"config.json": b'{"max_position_embeddings": 512}', "tokenizer.json": b"{}", "model.safetensors": b"w"}
    daemon.add_checkpoint(finished_job, 10, {**files, "trainer/state.json": b"{}"})
    return tmp_path / "said.json"


def test_the_program_asks_the_daemon_and_its_results_are_recorded(
    run: Run, daemon: Daemon, finished_job: JobRecord, said: Path
) -> None:
    done = run("checkpoint", "eval", "first@10", "--tasks", "arc", "--limit", "4", "-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["job_id"], found["step"]) == (finished_job.job_id, 10)
    assert [(one["metric"], one["value"], one["stderr"]) for one in found["results"]] == [
        ("acc", 0.5, 0.25),
        ("exact_match,strict", 1.0, None),
    ]
    given = json.loads(said.read_text())
    assert (given["options"]["--model"], given["options"]["--limit"]) == ("local-completions", "4")
    assert given["model"]["model"] == f"{finished_job.job_id}@10"
    assert given["model"]["base_url"] == "http://127.0.0.1:7172/v1/completions"
    assert (given["model"]["max_length"], given["key"]) == ("512", daemon.token)
    assert given["files"] == ["config.json", "tokenizer.json"], "no weights were fetched"
    first, _ = daemon.job(finished_job.job_id).task_results
    assert (first.num_samples, first.num_documents, first.version, first.program) == (4, 20, "2.0", "lm_eval 0.4.13")
    shown = run("job", "get", "first").stdout
    assert "task arc:" in shown and "acc 0.5000 +- 0.2500 (step 10, 4 of 20 documents, lm_eval 0.4.13)" in shown
    compared = json.loads(run("job", "compare", "first", "first", "-o", "json").stdout)
    assert compared["figures"]["arc/acc"] == [0.5, 0.5]


def test_results_are_a_table_and_are_kept_where_asked(run: Run, said: Path, tmp_path: Path) -> None:
    done = run("checkpoint", "eval", "first", "--tasks", "arc", "--results", str(tmp_path / "kept"))
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["TASK", "arc", "arc"]
    assert "4 of 20" in done.stdout and "its own table" not in done.stdout
    assert [*(tmp_path / "kept").rglob("results_*.json")]


def test_a_name_of_many_tasks_records_each_of_them(
    run: Run, daemon: Daemon, finished_job: JobRecord, said: Path
) -> None:
    done = run("checkpoint", "eval", "first", "--tasks", "many")
    assert done.exit_code == 0 and "the first 200 of 250 figures are recorded" in done.stderr
    assert len(daemon.job(finished_job.job_id).task_results) == 200
    shown = run("job", "get", "first").stdout
    assert shown.count("task part_") == 20 and "200 figures in all: -o json" in shown


def test_where_the_program_fails_nothing_is_recorded(
    run: Run, daemon: Daemon, finished_job: JobRecord, said: Path
) -> None:
    failed = run("checkpoint", "eval", "first", "--tasks", "broken")
    assert failed.exit_code == 5 and "ended with code 3" in failed.stderr
    nothing = run("checkpoint", "eval", "first", "--tasks", "none")
    assert nothing.exit_code == 5 and "has no figures of none" in nothing.stderr
    assert daemon.job(finished_job.job_id).task_results == ()


def test_who_may_not_record_is_refused_before_the_program_runs(
    run: Run, daemon: Daemon, finished_job: JobRecord, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORIZON_TOKEN", daemon.served.user("eve", role="viewer"))
    refused = run("checkpoint", "eval", finished_job.job_id, "--tasks", "arc")
    assert refused.exit_code == 3 and "may look but not change" in refused.stderr
    monkeypatch.setenv("HORIZON_TOKEN", daemon.served.user("bob"))
    assert run("checkpoint", "eval", finished_job.job_id, "--tasks", "arc").exit_code == 4
    assert not said.exists()


def test_the_daemons_ca_is_trusted_besides_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca, bundle = tmp_path / "daemon.pem", tmp_path / "bundle.pem"
    ca.write_text("the daemon's")
    assert trusting(None, bundle) == trusting(Path("system"), bundle) == {}
    variables = trusting(ca, bundle)
    assert variables == {"REQUESTS_CA_BUNDLE": str(bundle), "SSL_CERT_FILE": str(bundle)}
    assert "BEGIN CERTIFICATE" in bundle.read_text() and bundle.read_text().endswith("the daemon's")
    (tmp_path / "proxy.pem").write_text("the proxy's")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "proxy.pem"))
    trusting(ca, bundle)
    assert bundle.read_text() == "the proxy's\nthe daemon's"
    with pytest.raises(BadFile, match=r"nowhere\.pem"):
        trusting(tmp_path / "nowhere.pem", bundle)


def test_what_is_missing_or_does_not_belong_together(run: Run, said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = run("checkpoint", "eval", "first", "--tasks", "arc", "--set", "a=gsm8k")
    assert both.exit_code == 2 and "--tasks or --set" in both.stderr
    alone = run("checkpoint", "eval", "first", "--limit", "3")
    assert alone.exit_code == 2 and "--limit is for lm-evaluation-harness: give --tasks too" in alone.stderr
    assert run("checkpoint", "eval", "first", "--tasks", " ,").exit_code == 2
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = run("checkpoint", "eval", "first", "--tasks", "arc")
    assert missing.exit_code == 2 and "pip install 'horizon-train[eval]'" in missing.stderr
    assert not said.exists()


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"config.json": {"max_position_embeddings": 512}, "tokenizer_config.json": {"model_max_length": 64}}, "512"),
        ({"config.json": {"max_position_embeddings": 131072}}, "4096"),
        ({"adapter_config.json": {}, "tokenizer_config.json": {"model_max_length": 1024}}, "1024"),
        ({"config.json": {}, "tokenizer_config.json": {"model_max_length": 10**30}}, "4096"),
        ({}, "4096"),
    ],
)
def test_prompts_are_as_long_as_the_model_takes(files: dict[str, Any], most: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    fields: dict[str, Any] = {"limit": None, "num_fewshot": None, "include_path": None, "results": None, "url": None}
    command = Harness(tasks=["a"], batch_size=1, **fields).command(
        "job@1", Endpoint(server="127.0.0.1:7171", token="a", ca_file=None), tmp_path, tmp_path
    )
    assert f"max_length={most}" in command[command.index("--model_args") + 1].split(",")


@pytest.mark.parametrize(
    ("server", "ca", "url", "address"),
    [
        ("gpubox.lab.edu:7171", "/ca.pem", None, "https://gpubox.lab.edu:7172/v1/completions"),
        ("[::1]:7171", None, None, "http://[::1]:7172/v1/completions"),
        ("gpubox:7171", "system", "https://proxy.lab.edu/", "https://proxy.lab.edu/v1/completions"),
    ],
)
def test_where_the_daemon_is_asked(server: str, ca: str | None, url: str | None, address: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"limit": None, "num_fewshot": 2, "include_path": None, "batch_size": 8, "results": None}
    endpoint = Endpoint(server=server, token="hzn_secret", ca_file=Path(ca) if ca else None)
    harness = Harness(tasks=["a", "b"], url=url, **fields)
    command = harness.command("job@1", endpoint, tmp_path, tmp_path)
    given = dict(zip(command[4::2], command[5::2], strict=True))
    model = dict(one.split("=", 1) for one in given["--model_args"].split(","))
    assert model["base_url"] == address
    assert (given["--tasks"], given["--num_fewshot"], given["--batch_size"]) == ("a,b", "2", "8")
    assert not any("hzn_secret" in part for part in command)
