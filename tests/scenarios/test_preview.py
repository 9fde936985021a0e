"""A preview against the real daemon: by command, by library, by REST; who may see it, and what a hostile template can
do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from tests.support.both_daemons import KINDS, AnyDaemon, demo_spec, make_one, process_only
from tests.support.daemon_process import DaemonProcess, wait_for, wait_for_state
from tests.support.pushed_state import PushedState

from horizon_client import Client, InvalidRequest, NotFound
from horizon_server.demo.recipe import write_demo_dataset, write_demo_model

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GREEDY = "{{ messages[0]['content'] * 10000000000 }}"


@pytest.fixture(scope="module", params=KINDS)
def daemon(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pushed: PushedState
) -> Iterator[AnyDaemon]:
    running = make_one(request.param, tmp_path_factory.mktemp("preview") / "state", pushed)
    try:
        yield running.start()
    finally:
        running.close()


@pytest.fixture(scope="module")
def ada(daemon: AnyDaemon, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A user's token; she has pushed `demo-model` and `demo-chats`."""
    files = tmp_path_factory.mktemp("files")
    token = daemon.user("ada")
    with daemon.client(token) as client:
        client.models.push(write_demo_model(files / "model"), name="demo-model")
        client.datasets.push([write_demo_dataset(files)], name="demo-chats")
    return token


@pytest.fixture
def client(daemon: AnyDaemon, ada: str) -> Iterator[Client]:
    with daemon.client(ada) as opened:
        yield opened


def test_by_command_library_and_rest_alike(daemon: AnyDaemon, ada: str, client: Client) -> None:
    preview = client.datasets.preview("demo-chats", model="demo-model", num_rows=2, offset=1)
    assert (len(preview.rows), preview.format, preview.train_on) == (2, "messages", "assistant")
    assert preview.num_rows == client.datasets.get("demo-chats").num_rows
    first = preview.rows[0]
    assert (first.file, first.unit, first.number) == ("lab-box-chats.jsonl", "line", 2)
    assert "".join(span.text for span in first.spans).startswith("<|im_start|>")
    assert all(span.text.endswith("<|im_end|>") for span in first.spans if span.trained)
    assert 0 < first.num_trained_tokens < first.num_tokens

    query = {"model": "demo-model", "n": "2", "offset": "1"}
    url = f"http://{daemon.endpoints['http']}/horizon/v1/datasets/demo-chats/preview"
    rest = httpx.get(url, params=query, headers={"Authorization": f"Bearer {ada}"}, timeout=240).json()
    command = [sys.executable, "-m", "horizon_client", "dataset", "preview", "demo-chats", "--model", "demo-model"]
    flags = ["-n", "2", "--offset", "1", "--server", daemon.endpoints["grpc"]]
    environment = {"HORIZON_TOKEN": ada, "PYTHONPATH": ":".join(sys.path)}
    in_json, table = (
        subprocess.run(
            [*command, *flags, *more], env=environment, capture_output=True, text=True, check=True, timeout=240
        ).stdout
        for more in (["-o", "json"], [])
    )
    assert rest["rows"] == json.loads(in_json)["rows"]
    assert [row["spans"] for row in rest["rows"]] == [
        [{"text": span.text, "trained": span.trained, "weight": None} for span in row.spans] for row in preview.rows
    ]
    assert "trained text is between [[ and ]]" in table
    assert "<|im_end|>]]" in table


def test_a_preview_counts_what_a_job_then_trains_on(client: Client, tmp_path: Path) -> None:
    """Every row of a dataset, shown and then prepared: tokens and trained tokens are the same."""
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes " * i}]}
        for i in range(1, 30)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    client.datasets.push([tmp_path / "rows.jsonl"], name="counted")
    shown = client.datasets.preview("counted", model="demo-model", num_rows=100, sequence_length=64).rows
    job = client.jobs.submit({**demo_spec("counted", max_steps=1, sequence_length=64), "dataset": "counted"})
    assert wait_for_state(client, job.job_id, "SUCCEEDED", "FAILED").state == "SUCCEEDED"
    (report,) = [e.report for e in client.jobs.watch(job.job_id) if e.kind == "prepare" and e.report]
    assert report["rows"] == len(shown) == 29
    assert report["tokens"] == sum(row.num_tokens for row in shown)
    assert report["trained_tokens"] == sum(row.num_trained_tokens for row in shown)
    assert report["truncated_tokens"] == sum(row.num_cut_tokens for row in shown) > 0


def test_pairs_are_pushed_shown_and_known_by_their_kind(
    daemon: AnyDaemon, ada: str, client: Client, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i}?", "chosen": "yes " * i, "rejected": "no"} for i in range(1, 30)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    client.datasets.push([tmp_path / "pairs.jsonl"], name="pairs")
    pushed = client.datasets.get("pairs")
    assert (pushed.format, pushed.data_kind, pushed.num_rows) == ("preference", "preference", 29)
    assert client.datasets.get("demo-chats").data_kind == "text"
    url = f"http://{daemon.endpoints['http']}/horizon/v1/datasets"
    listed = httpx.get(url, headers={"Authorization": f"Bearer {ada}"}, timeout=240).json()["datasets"]
    assert {"pairs": "preference", "demo-chats": "text"}.items() <= {d["name"]: d["data_kind"] for d in listed}.items()

    shown = client.datasets.preview("pairs", model="demo-model", num_rows=2, offset=26, sequence_length=64).rows
    assert [(row.number, row.part) for row in shown] == [(n, part) for n in (27, 28) for part in ("chosen", "rejected")]
    assert [row.num_trained_tokens > 0 for row in shown] == [True] * 4
    with pytest.raises(InvalidRequest, match="of kind preference"):
        client.jobs.submit({**demo_spec("pairs", max_steps=1, sequence_length=64), "dataset": "pairs"})


def test_what_is_not_there_and_what_is_anothers_are_told_alike(daemon: AnyDaemon, client: Client) -> None:
    client.datasets.preview("demo-chats", model="demo-model", num_rows=1)
    with daemon.client(daemon.user("bob")) as bob:
        said = []
        for dataset, model in (("demo-chats", "demo-model"), ("no-chats", "demo-model")):
            with pytest.raises(NotFound) as caught:
                bob.datasets.preview(dataset, model=model)
            said.append(caught.value.message.replace(dataset, "NAME"))
        assert said[0] == said[1]
        (daemon.state_dir.parent / "own.jsonl").write_text('{"text": "mine"}\n')
        bob.datasets.push([daemon.state_dir.parent / "own.jsonl"], name="own")
        said = []
        for model in ("demo-model", "no-model"):
            with pytest.raises(NotFound) as caught:
                bob.datasets.preview("own", model=model)
            said.append(caught.value.message.replace(model, "NAME"))
        assert said[0] == said[1]


def test_beyond_the_last_row_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="offset is 5000, but dataset demo-chats has") as caught:
        client.datasets.preview("demo-chats", model="demo-model", offset=5000)
    assert caught.value.violations[0].field == "offset"


@pytest.fixture
def push_with(client: Client, tmp_path: Path) -> Callable[[str, str | None], None]:
    """Push a model whose chat template is this, or that has none."""

    def push(name: str, template: str | None) -> None:
        model = write_demo_model(tmp_path / name)
        if template is None:
            (model / "chat_template.jinja").unlink()
        else:
            (model / "chat_template.jinja").write_text(template, encoding="ascii")
        client.models.push(model, name=name)

    return push


def test_a_model_without_a_template_is_told_in_a_sentence(client: Client, push_with: Callable[..., None]) -> None:
    push_with("bare", None)
    with pytest.raises(InvalidRequest, match=r"the model has no chat template; add chat_template\.jinja") as caught:
        client.datasets.preview("demo-chats", model="bare")
    assert caught.value.reason == "INVALID_DATA"


def previews_of(daemon: AnyDaemon) -> list[psutil.Process]:
    assert isinstance(daemon, DaemonProcess)
    found = []
    for child in psutil.Process(daemon.pid).children():
        with suppress(psutil.NoSuchProcess):  # another child of the daemon that has ended meanwhile
            if "horizon_server.datasets.preview_child" in child.cmdline():
                found.append(child)
    return found


@process_only("children of its own", "daemon")
def test_a_template_that_takes_all_memory_takes_its_own_only(
    daemon: AnyDaemon, client: Client, push_with: Callable[..., None]
) -> None:
    push_with("greedy", GREEDY)
    with pytest.raises(InvalidRequest, match="takes more than 4 GiB of memory"):
        client.datasets.preview("demo-chats", model="greedy")
    assert client.datasets.preview("demo-chats", model="demo-model", num_rows=1).rows
    assert previews_of(daemon) == [], "no process is left of either"


@process_only("children of its own", "daemon")
def test_a_caller_who_hangs_up_ends_an_endless_template(
    daemon: AnyDaemon, ada: str, client: Client, push_with: Callable[..., None]
) -> None:
    push_with("endless", ENDLESS)
    command = [
        sys.executable,
        "-m",
        "horizon_client",
        "dataset",
        "preview",
        "demo-chats",
        "--model",
        "endless",
        "--server",
        daemon.endpoints["grpc"],
    ]
    waiting = subprocess.Popen(command, env={"HORIZON_TOKEN": ada, "PYTHONPATH": ":".join(sys.path)})
    try:
        wait_for(lambda: previews_of(daemon) != [], 240)
    finally:
        waiting.kill()
        waiting.wait(240)
    assert client.datasets.preview("demo-chats", model="demo-model", num_rows=1).rows, "and the next one has its turn"
    assert previews_of(daemon) == []
