"""The life of a session, against the real daemon: its steps against a plain loop, and everything killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.daemon_process import DaemonProcess
from tests.support.pushed_state import MODEL, PushedState
from transformers import AutoModelForCausalLM

FLOAT32 = {"train": {"compute_dtype": "float32"}}


@pytest.fixture
def daemon(tmp_path: Path, pushed: PushedState) -> Iterator[DaemonProcess]:
    running = pushed.daemon(tmp_path / "state")
    running.start()
    try:
        yield running
    finally:
        running.close()


def rows_of(step: int, *, vocabulary: int = 200) -> list[dict[str, Any]]:
    """The documents of a step, drawn by its number."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for length in (7, 12, 9, 5):
        tokens = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        found.append({"tokens": tokens, "weights": [0.0, 0.0] + [1.0] * (length - 2)})
    return found


def plain_losses(folder: Path, *, num_steps: int, lr: float) -> list[float]:
    """The same steps by torch alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    losses = []
    for step in range(num_steps):
        total = 0.0
        for row in rows_of(step):
            ids = torch.tensor([row["tokens"]])
            logprobs = torch.log_softmax(model(ids).logits[0].float(), -1)
            targets = ids[0, 1:]
            picked = logprobs[:-1].gather(1, targets[:, None])[:, 0]
            loss = -(picked * torch.tensor(row["weights"][:-1])).sum()
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def test_twenty_steps_are_those_of_a_plain_loop(daemon: DaemonProcess, pushed: PushedState) -> None:
    with daemon.client(daemon.user("ada")) as client:
        with client.session(MODEL, max_tokens=64, max_tokens_per_call=256, spec=FLOAT32) as session:
            found = []
            for step in range(20):
                computed = session.forward_backward(rows_of(step))
                session.optim_step(1e-4)
                found.append(computed.result().loss)
            job = client.jobs.get(session.job.job_id)
            assert job.state == "RUNNING"
        assert client.jobs.get(session.job.job_id).state == "SUCCEEDED"
    wanted = plain_losses(pushed.model, num_steps=20, lr=1e-4)
    assert found == pytest.approx(wanted, rel=1e-6)
