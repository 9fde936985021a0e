"""The life of a session, against the real daemon: its steps against a plain loop, and everything killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.daemon_process import DaemonProcess
from tests.support.pushed_state import MODEL, PushedState
from transformers import AutoModelForCausalLM

from horizon_client import Client

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
            torch.autograd.backward(loss)
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


def run_of(client: Client, *, name: str, before: Callable[[int], None] = lambda _: None) -> tuple[list[Any], str]:
    """What 12 steps of two calls each answer, and the id of the session; `before` is called before every call."""
    lora = {"rank": 4, "alpha": 8, "dropout": 0.1}
    with client.session(MODEL, name=name, lora=lora, max_tokens=64, max_tokens_per_call=256, spec=FLOAT32) as session:
        futures: list[Any] = []
        for step in range(12):
            rows = rows_of(step)
            for part in (rows[:2], rows[2:]):
                before(len(futures))
                futures.append(session.forward_backward(part))
            before(len(futures))
            futures.append(session.optim_step(1e-2, max_grad_norm=1.0))
            if step % 3 == 1:
                futures[-1].result()
        return [future.result() for future in futures], session.job.job_id


def weights_of(daemon: DaemonProcess, job_id: str) -> bytes:
    (checkpoint,) = sorted((daemon.state_dir / "jobs" / job_id / "checkpoints").glob("step-*"))[-1:]
    return (checkpoint / "adapter_model.safetensors").read_bytes()


NUM_KILLS = int(os.environ.get("HORIZON_KILLS", "4"))


def test_whatever_is_killed_no_call_is_lost_and_no_bit_differs(daemon: DaemonProcess) -> None:
    with daemon.client(daemon.user("ada")) as client:
        wanted, job_id = run_of(client, name="calm")
        wanted_weights = weights_of(daemon, job_id)
        chance = random.Random(7)
        left = NUM_KILLS
        while left > 0:
            # No more in a session than it may lose workers without progress.
            places = dict.fromkeys(sorted(chance.sample(range(36), min(4, left))))
            left -= len(places)

            def kill(number: int, places: dict[int, None] = places) -> None:
                if number not in places:
                    return
                if chance.random() < 0.5:
                    for pid in daemon.worker_pids():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                else:
                    daemon.kill()
                    daemon.start()

            found, job_id = run_of(client, name="killed", before=kill)
            assert found == wanted
            assert weights_of(daemon, job_id) == wanted_weights
