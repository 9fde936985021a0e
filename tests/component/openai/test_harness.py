"""lm-evaluation-harness, unmodified, on a checkpoint: its figures are those of its own `hf` model on the pulled folder,
and the job's record has them."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from tests.support.daemon_process import DaemonProcess
from tests.support.pushed_state import PushedState

from horizon_client.job_spec_types import JobSpec

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm-evaluation-harness is not installed: pip install -c constraints.txt 'lm-eval[api]'",
)

SPEC: JobSpec = {
    "name": "measured",
    "model": "demo-model",
    "dataset": "box-questions",
    "method": "pretrain",
    "train": {
        "max_steps": 80,
        "sequence_length": 64,
        "tokens_per_step": 256,
        "learning_rate": 2e-3,
        "compile": "off",
    },
}
QUESTIONS = [
    {"q": "Why keep weights in RAM?", "a": "Because RAM is large", "b": "Because it rains", "right": 0},
    {"q": "What does the GPU borrow?", "a": "A bicycle", "b": "One layer at a time", "right": 1},
    {"q": "The lab box", "a": "trains models", "b": "sings", "right": 0},
    {"q": "One, two,", "a": "nine", "b": "three", "right": 1},
    {"q": "Who waits?", "a": "The queue", "b": "Nobody at all", "right": 0},
    {"q": "A step is", "a": "one update", "b": "a stair of stone", "right": 0},
]
CHOICES = """
task: box_choice
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_target: right
doc_to_choice: ["{{a}}", "{{b}}"]
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 2}
"""
LIKELIHOOD = """
task: box_likelihood
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: loglikelihood
doc_to_text: "{{q}}"
doc_to_target: " {{a}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
metadata: {version: 1}
"""
ANSWERS = r"""
task: box_answer
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: " {{[a, b][right]}}"
generation_kwargs: {until: ["\n"], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
  - {metric: chrf, aggregation: chrf, higher_is_better: true}
metadata: {version: 1}
"""
TASKS = "box_choice,box_likelihood,box_answer"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name, text in (("choice", CHOICES), ("likelihood", LIKELIHOOD), ("answer", ANSWERS)):
        (folder / f"box_{name}.yaml").write_text(text.replace("DATA", json.dumps(str(data))))
    return folder


@pytest.fixture(scope="module")
def environment(daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a program of ada's is started with; no data set is looked for elsewhere."""
    return {
        **os.environ,
        "HORIZON_SERVER": daemon.endpoints["grpc"],
        "HORIZON_TOKEN": daemon.user("ada"),
        "HORIZON_CONFIG_DIR": str(tmp_path_factory.mktemp("config")),
        "HF_HOME": str(tmp_path_factory.mktemp("hf")),
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="module")
def run(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command of Python's, to its end."""

    def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=540)

    return start


def test_the_figures_are_those_of_its_own_model_and_are_recorded(
    daemon: DaemonProcess, run: Callable[..., subprocess.CompletedProcess[str]], tasks: Path, tmp_path: Path
) -> None:
    with daemon.client(daemon.user("ada")) as client:
        # What it is taught of them is right but for the last two
        taught = [{"text": f"{q['q']} {q['a' if q['right'] == 0 else 'b']}\n"} for q in QUESTIONS[:-2]]
        client.datasets.push(taught * 8, name="box-questions")
        job = client.jobs.submit(SPEC)
        assert client.jobs.wait(job.job_id, timeout_s=240).state == "SUCCEEDED"
        client.checkpoints.pull(job.job_id, tmp_path / "tuned")
        url = f"http://{daemon.endpoints['http']}"
        command = ("horizon_client", "checkpoint", "eval", "measured@80", "--tasks", TASKS)
        done = run(*command, "--include-path", tasks, "--url", url, "-o", "json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["job_id"], found["step"]) == (job.job_id, 80)

        model = f"pretrained={tmp_path / 'tuned'},dtype=float32"
        plain = run(
            *("lm_eval", "run", "--model", "hf", "--model_args", model, "--device", "cpu", "--tasks", TASKS),
            *("--include_path", tasks, "--output_path", tmp_path / "plain"),
        )
        assert plain.returncode == 0, plain.stderr
        (file,) = (tmp_path / "plain").rglob("results_*.json")
        theirs = json.loads(file.read_text())["results"]
        ours = {(one["task"], one["metric"]): one for one in found["results"]}
        assert len(ours) == 6
        for (task, metric), one in ours.items():
            expected = theirs[task][f"{metric},none"]
            if metric == "perplexity":  # of the log-likelihoods
                assert math.log(one["value"]) == pytest.approx(math.log(expected), rel=1e-6)
            else:
                assert one["value"] == expected, (task, metric)
            assert (one["num_samples"], one["num_documents"]) == (6, 6)
        print({key: one["value"] for key, one in ours.items()})
        # Neither nothing nor everything is right, so that equal figures say something
        assert 0 < ours["box_answer", "exact_match"]["value"] < 1 and ours["box_answer", "chrf"]["value"] > 0
        assert ours["box_choice", "acc"]["version"] == "2"
        assert ours["box_choice", "acc"]["program"].startswith("lm_eval 0.")

        kept = client.jobs.get(job.job_id).task_results
        assert {(one.task, one.metric): one.value for one in kept} == {key: one["value"] for key, one in ours.items()}
        again = run(*command[:-1], "box_choice", "--limit", "2", "--include-path", tasks, "--url", url)
        assert again.returncode == 0 and "2 of 6" in again.stdout, again.stderr
        kept = client.jobs.get(job.job_id).task_results
        assert len(kept) == 6 and {one.num_samples for one in kept if one.task == "box_choice"} == {2}
        shown = run("horizon_client", "job", "get", "measured")
        assert "task box_choice:" in shown.stdout and "2 of 6 documents" in shown.stdout


def test_an_adapter_is_measured_beside_its_base(
    daemon: DaemonProcess,
    pushed: PushedState,
    run: Callable[..., subprocess.CompletedProcess[str]],
    tasks: Path,
    tmp_path: Path,
) -> None:
    lora = {"trainable": "lora", "lora": {"rank": 4}, "max_steps": 20, "learning_rate": 5e-3}
    with daemon.client(daemon.user("ada")) as client:
        spec = {**SPEC, "name": "adapter", "dataset": "demo-chats", "method": "sft", "train": {**SPEC["train"], **lora}}
        job = client.jobs.submit(cast("JobSpec", spec))
        assert client.jobs.wait(job.job_id, timeout_s=240).state == "SUCCEEDED"
        client.checkpoints.pull(job.job_id, tmp_path / "adapter")
    url = f"http://{daemon.endpoints['http']}"
    one = ("--tasks", "box_likelihood")
    done = run(
        "horizon_client", "checkpoint", "eval", "adapter", *one, "--include-path", tasks, "--url", url, "-o", "json"
    )
    assert done.returncode == 0, done.stderr
    model = f"pretrained={pushed.model},peft={tmp_path / 'adapter'},dtype=float32"
    plain = run(
        *("lm_eval", "run", "--model", "hf", "--model_args", model, "--device", "cpu", *one),
        *("--include_path", tasks, "--output_path", tmp_path / "plain"),
    )
    assert plain.returncode == 0, plain.stderr
    (file,) = (tmp_path / "plain").rglob("results_*.json")
    expected = json.loads(file.read_text())["results"]["box_likelihood"]
    ours = {one["metric"]: one["value"] for one in json.loads(done.stdout)["results"]}
    print(ours, expected)
    assert math.log(ours["perplexity"]) == pytest.approx(math.log(expected["perplexity,none"]), rel=1e-6)


def test_a_task_that_is_not_there_records_nothing(
    daemon: DaemonProcess, run: Callable[..., subprocess.CompletedProcess[str]], tasks: Path
) -> None:
    url = f"http://{daemon.endpoints['http']}"
    done = run("horizon_client", "checkpoint", "eval", "measured", "--tasks", "box_none", "--url", url)
    assert done.returncode == 5 and "lm-evaluation-harness ended with code" in done.stderr
