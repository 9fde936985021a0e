"""What people get wrong most: tokens, names and spec files. Each gets an exit code and a sentence."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from tests.support.node import Node, Shell, run_horizond

SPEC = (
    "name: job\nmodel: demo-model\ndataset: demo-chats\ntrain: {max_steps: 2, sequence_length: 64, tokens_per_step: "
    "128}\n"
)


def test_a_wrong_token(shell: Shell) -> None:
    assert "the token is not known here" in replace(shell, token="hzn_wrong").fails(3, "job", "list")


def test_no_token(shell: Shell) -> None:
    sentence = replace(shell, token=None).fails(3, "node", "status")
    assert "no token" in sentence
    assert "horizon login" in sentence


def test_an_expired_token_and_a_revoked_one(node: Node, shell: Shell) -> None:
    state = ("--state-dir", str(node.daemon.state_dir))
    made = run_horizond("token", "create", "ada", "--expires", "1h", *state)
    token_id = made.stderr.split()[1]
    expired = replace(shell, token=made.stdout.strip())
    expired.works("job", "list")
    database = sqlite3.connect(node.daemon.state_dir / "horizon.db", timeout=240)
    with database:
        database.execute("UPDATE tokens SET expires_s = 1.0 WHERE token_id = ?", (token_id,))
    database.close()
    assert f"token {token_id} has expired" in expired.fails(3, "job", "list")
    assert run_horizond("token", "revoke", token_id, *state).returncode == 0
    assert f"token {token_id} was revoked" in expired.fails(3, "job", "list")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("job", "get", "nope"), "job 'nope' does not exist, or is not yours; see: horizon job list"),
        (("job", "watch", "nope"), "job 'nope' does not exist"),
        (("job", "logs", "nope"), "job 'nope' does not exist"),
        (("job", "cancel", "nope"), "job 'nope' does not exist"),
        (("dataset", "get", "nope"), "dataset 'nope' does not exist, or is not yours"),
        (("dataset", "delete", "nope"), "dataset 'nope' does not exist, or is not yours"),
        (("model", "get", "nope"), "model 'nope' does not exist, or is not yours"),
        (("checkpoint", "pull", "nope", "--to", "out"), "job 'nope' does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_exist(shell: Shell, command: tuple[str, ...], words: str) -> None:
    assert words in shell.fails(4, *command)


@pytest.mark.parametrize("field", ["model", "dataset", "eval_dataset"])
def test_a_spec_that_names_what_does_not_exist(shell: Shell, field: str) -> None:
    (shell.home / "job.yaml").write_text(SPEC)
    sentence = shell.fails(4, "job", "submit", "job.yaml", "--set", f"{field}=nope")
    assert f"{field.removeprefix('eval_')} 'nope' does not exist" in sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            SPEC.replace("max_steps", "max_step"),
            "train.max_step is not a field of the job spec; did you mean max_steps?",
        ),
        (SPEC + "modle: x\n", "modle is not a field of the job spec"),
        (SPEC.replace("max_steps: 2", "max_steps: two"), "train.max_steps is 'two'; it must be a whole number"),
        (SPEC.replace("max_steps: 2", "max_steps: 0"), "train.max_steps is 0; it must be a whole number from 1 to"),
        (SPEC.replace("name: job\n", ""), "name is required"),
        (SPEC.replace("name: job", "name: [job"), "job.yaml, line 2: not YAML"),
        ("- just\n- a list\n", "job.yaml"),
        ("", "job.yaml"),
    ],
    ids=["unknown-key", "unknown-top-key", "wrong-type", "out-of-range", "missing", "not-yaml", "a-list", "empty"],
)
def test_a_malformed_spec_file(shell: Shell, text: str, words: str) -> None:
    (shell.home / "job.yaml").write_text(text)
    before = shell.works("job", "list", "-o", "name")
    assert words in shell.fails(2, "job", "submit", "job.yaml")
    assert shell.works("job", "list", "-o", "name") == before


def test_a_spec_file_that_is_not_there_or_is_not_text(shell: Shell) -> None:
    assert "No such file" in shell.fails(2, "job", "submit", "job.yaml")
    (shell.home / "job.yaml").write_bytes(b"name: \xff\n")
    assert "UTF-8" in shell.fails(2, "job", "submit", "job.yaml")


def test_several_violations_are_told_at_once(shell: Shell) -> None:
    (shell.home / "job.yaml").write_text(SPEC.replace("max_steps: 2", "learning_rate: -1, warmup_steps: -2"))
    sentence = shell.fails(2, "job", "submit", "job.yaml")
    assert "train.learning_rate is -1" in sentence
    assert "train.warmup_steps is -2" in sentence


def test_an_unreachable_daemon(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hzn_any")
    sentence = Shell("127.0.0.1:1", None, tmp_path).fails(5, "login", "127.0.0.1:1", "--token-file", "token")
    assert "cannot reach horizond at 127.0.0.1:1: nothing listens there" in sentence


def test_plain_text_never_leaves_the_machine(tmp_path: Path) -> None:
    sentence = Shell("192.0.2.1:7171", "hzn_any", tmp_path).fails(2, "node", "status")
    assert "needs TLS" in sentence


def test_a_priority_that_no_spec_may_have(shell: Shell) -> None:
    (shell.home / "job.yaml").write_text(SPEC)
    sentence = shell.fails(2, "job", "submit", "job.yaml", "--set", "priority=101")
    assert "priority is 101; it must be a whole number from -100 to 100" in sentence


def test_a_call_that_only_another_version_knows(node: Node) -> None:
    """A newer client's call, and a request of a newer contract: an answer with a status, and the daemon goes on."""
    metadata = (("authorization", f"Bearer {node.token}"),)
    with grpc.insecure_channel(node.daemon.endpoints["grpc"]) as channel:
        newer = channel.unary_unary("/horizon_proto.v1.JobService/MergeJobs", bytes, bytes)
        with pytest.raises(grpc.RpcError) as caught:
            newer(b"", metadata=metadata, timeout=240)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        known = channel.unary_unary("/horizon_proto.v1.JobService/ListJobs", bytes, bytes)
        unknown_field = b"\xf2\x3e\x01x"  # field 1006, a text
        assert known(unknown_field, metadata=metadata, timeout=240) is not None
