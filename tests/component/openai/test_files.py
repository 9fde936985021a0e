"""Files by OpenAI's SDK: uploaded, checked, listed, read back and deleted."""

from __future__ import annotations

import http.client
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import (
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    OpenAI,
    PermissionDeniedError,
)
from tests.component.openai.conftest import CHATS, Connect, lines
from tests.support.daemon_process import DaemonProcess

from horizon_server.api.openai.errors import MAX_FILE_BYTES
from horizon_server.api.openai.forms import MAX_FIELD_BYTES

USER = {"role": "user", "content": "Who wrote Faust?"}


def post(client: OpenAI, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    """What the SDK would not send."""
    authorization = {"Authorization": f"Bearer {client.api_key}"}
    return httpx.post(f"{client.base_url}files", headers=authorization | (headers or {}), timeout=240, **body)


def assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


PREFERENCES = [
    {"input": {"messages": [USER]}, "preferred_output": assistant("Goethe."), "non_preferred_output": assistant("No.")},
    {
        "input": {"messages": [USER], "tools": []},
        "preferred_output": assistant("G."),
        "non_preferred_output": assistant("?"),
    },
]
PAIRS = [{"prompt": "Who wrote Faust?", "completion": " Goethe."}]


def test_a_file_comes_back_as_it_was_sent(client: OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "my chats.jsonl"
    path.write_bytes(lines(CHATS))

    made = client.files.create(file=path, purpose="fine-tune")

    assert (made.filename, made.bytes, made.purpose) == ("my chats.jsonl", path.stat().st_size, "fine-tune")
    assert made.status == "processed"
    assert client.files.retrieve(made.id) == made
    assert client.files.wait_for_processing(made.id) == made
    assert client.files.content(made.id).read() == path.read_bytes()
    assert made.id in [file.id for file in client.files.list()]

    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    with pytest.raises(NotFoundError, match="No such File object") as caught:
        client.files.retrieve(made.id)
    assert caught.value.param == "id"
    assert made.id not in [file.id for file in client.files.list()]


@pytest.mark.parametrize(
    ("rows", "kind"), [(CHATS, "messages"), (PREFERENCES, "openai-preference"), (PAIRS, "prompt-completion")]
)
def test_a_file_is_a_dataset(client: OpenAI, daemon: DaemonProcess, rows: list[Any], kind: str) -> None:
    made = client.files.create(file=("rows.jsonl", lines(rows)), purpose="fine-tune")
    with daemon.client(daemon.user("ada")) as ours:
        dataset = ours.datasets.get(made.id.replace("file-", "dataset_"))
    assert (dataset.format, dataset.num_rows, dataset.state) == (kind, len(rows), "READY")


def test_the_same_file_again_is_the_same_and_another_one_is_not(client: OpenAI) -> None:
    first = client.files.create(file=("twice.jsonl", lines(CHATS[:2])), purpose="fine-tune")
    assert client.files.create(file=("twice.jsonl", lines(CHATS[:2])), purpose="fine-tune") == first
    other = client.files.create(file=("twice.jsonl", lines(CHATS[:3])), purpose="fine-tune")
    assert other.id != first.id
    assert {first.id, other.id} <= {file.id for file in client.files.list()}


def test_bytes_without_a_name_are_json_lines(client: OpenAI) -> None:
    made = client.files.create(file=lines(CHATS[:1]), purpose="fine-tune")
    assert made.filename.endswith(".jsonl")
    assert made.status == "processed"


def test_a_bad_row_is_refused_with_line_and_field_and_nothing_is_kept(client: OpenAI) -> None:
    before = [file.id for file in client.files.list()]
    bad = {"messages": [{"role": "user", "content": "Hi"}, {"role": "robot", "content": "Hey"}]}
    with pytest.raises(BadRequestError, match=r"bad\.jsonl:2: messages\[1\]\.role is 'robot'") as caught:
        client.files.create(file=("bad.jsonl", lines([CHATS[0], bad])), purpose="fine-tune")
    error = caught.value
    assert (error.type, error.param, error.code) == ("invalid_request_error", "file", "invalid_file_format")
    assert [file.id for file in client.files.list()] == before


@pytest.mark.parametrize(
    ("content", "fields", "param", "words"),
    [
        (lines(CHATS), {"purpose": "batch"}, "purpose", "must be fine-tune"),
        (lines(CHATS), {}, "purpose", "Missing required parameter: 'purpose'"),
        (lines(CHATS), {"purpose": "fine-tune", "colour": "red"}, "colour", "Unknown parameter: 'colour'"),
        (lines(CHATS), {"purpose": "fine-tune", "expires_after[anchor]": "x"}, "expires_after", "not carried out"),
        (lines(CHATS), {"purpose": "x" * (MAX_FIELD_BYTES + 1)}, "purpose", f"more than {MAX_FIELD_BYTES} bytes"),
        (b"", {"purpose": "fine-tune"}, None, "the file is empty"),
        (b"no json", {"purpose": "fine-tune"}, "file", r"a\.jsonl:1"),
    ],
)
def test_what_cannot_be_a_file_is_refused(
    client: OpenAI, content: bytes, fields: dict[str, str], param: str | None, words: str
) -> None:
    answer = post(client, data=fields, files={"file": ("a.jsonl", content)})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert re.search(words, error["message"])


def test_a_body_that_is_no_form_is_refused(client: OpenAI) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    for answer, words in (
        (post(client, json={"purpose": "fine-tune"}), "must be multipart/form-data"),
        (post(client, headers=form, content=b"not a form"), "the form is broken"),
        (post(client, headers=form, content=b"--x--\r\n"), "Missing required parameter: 'file'"),
        (post(client, files=[("file", ("a", b"{}")), ("file", ("b", b"{}"))]), "two files"),
    ):
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


def test_a_file_that_is_too_large_is_refused_unread(client: OpenAI, daemon: DaemonProcess) -> None:
    connection = http.client.HTTPConnection(daemon.endpoints["http"])
    connection.putrequest("POST", "/v1/files")
    connection.putheader("Authorization", f"Bearer {client.api_key}")
    connection.putheader("Content-Length", str(MAX_FILE_BYTES + 2**20))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.load(answer)["error"]["code"] == "too_large"
    connection.close()


def test_a_list_has_pages(client: OpenAI) -> None:
    made = [client.files.create(file=(f"{i}.jsonl", lines(CHATS[i:])), purpose="fine-tune").id for i in range(5)]
    page = client.files.list(limit=2)
    assert [file.id for file in page.data] == [made[4], made[3]]
    assert page.has_more
    assert [file.id for file in page.get_next_page().data] == [made[2], made[1]]
    # The SDK follows the pages by itself.
    assert [file.id for file in client.files.list(limit=2)][:5] == made[::-1]
    assert client.files.list(purpose="batch").data == []
    with pytest.raises(BadRequestError, match="order"):
        client.files.list(order="asc")
    with pytest.raises(BadRequestError) as caught:
        client.files.list(limit=0)
    assert caught.value.param == "limit"
    with pytest.raises(NotFoundError):
        client.files.list(after="file-000000000000")


def test_anothers_file_is_not_found(client: OpenAI, connect: Connect) -> None:
    made = client.files.create(file=("mine.jsonl", lines(CHATS)), purpose="fine-tune")
    bob = connect("bob")
    assert list(bob.files.list()) == []
    for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
        with pytest.raises(NotFoundError):
            call(made.id)
    assert client.files.retrieve(made.id) == made


def test_viewers_and_wrong_keys_may_not_upload(connect: Connect) -> None:
    with pytest.raises(PermissionDeniedError, match="viewer") as denied:
        connect("eve", role="viewer").files.create(file=lines(CHATS), purpose="fine-tune")
    assert denied.value.type == "permission_error"
    with pytest.raises(AuthenticationError) as caught:
        connect(api_key="hzn_wrong").files.create(file=lines(CHATS), purpose="fine-tune")
    assert caught.value.code == "invalid_api_key"


def test_a_dataset_of_several_files_is_listed_and_cannot_be_sent(
    client: OpenAI, daemon: DaemonProcess, tmp_path: Path
) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_bytes(lines(CHATS))
    with daemon.client(daemon.user("ada")) as ours:
        ours.datasets.push(paths, name="two-files")
        dataset = ours.datasets.get("two-files")
    key = dataset.dataset_id.replace("dataset_", "file-")
    assert client.files.retrieve(key).filename == "two-files"
    assert client.files.retrieve("two-files").id == key
    with pytest.raises(BadRequestError, match="2 files"):
        client.files.content(key)


def test_files_and_their_ids_outlive_the_daemon(client: OpenAI, daemon: DaemonProcess) -> None:
    made = client.files.create(file=("kept.jsonl", lines(CHATS)), purpose="fine-tune")
    daemon.terminate()
    daemon.start()
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == lines(CHATS)
