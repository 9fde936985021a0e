"""The life of a session, against the real daemon: its steps against a plain loop, and everything killed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.support.daemon_process import DaemonProcess, wait_for
from tests.support.pages import ROOT
from tests.support.pushed_state import MODEL, PushedState
from transformers import AutoModelForCausalLM

from horizon_client import Client
from horizon_client.errors import InvalidData, NotFound, WrongJobState
from horizon_client.sessions import Session

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


def plain_losses(folder: Path, *, num_steps: int, lr: float, adapter: Path | None = None) -> list[float]:
    """The same steps by torch alone; of an adapter, by PEFT."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
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


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_twenty_steps_of_an_adapter_are_those_of_peft(daemon: DaemonProcess, pushed: PushedState) -> None:
    lora = {"rank": 4, "alpha": 8}
    with (
        daemon.client(daemon.user("ada")) as client,
        client.session(MODEL, lora=lora, max_tokens=64, max_tokens_per_call=256, spec=FLOAT32) as session,
    ):
        job_id, _, step = session.save_state("drawn").result().rpartition("@")
        losses = []
        for number in range(20):
            computed = session.forward_backward(rows_of(number))
            session.optim_step(1e-3)
            losses.append(computed.result().loss)
    drawn = daemon.state_dir / "jobs" / job_id / "checkpoints" / f"step-{int(step):08}"
    wanted = plain_losses(pushed.model, num_steps=20, lr=1e-3, adapter=drawn)
    untrained = plain_losses(pushed.model, num_steps=20, lr=0.0)
    assert wanted[-1] != pytest.approx(untrained[-1], rel=1e-4), "the adapter changes what comes out"
    assert losses == pytest.approx(wanted, rel=1e-6)


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


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client(daemon.user("ada")) as made:
        yield made


def session_of(client: Client, **options: Any) -> Session:
    return client.session(MODEL, **{"max_tokens": 64, "max_tokens_per_call": 512, "spec": FLOAT32, **options})


def test_samples_have_the_log_probabilities_of_training(client: Client) -> None:
    with session_of(client) as session:
        session.forward_backward(rows_of(0))
        session.optim_step(1e-2)
        prompts = [[5, 6, 7], [9, 10, 11, 12]]
        answers = session.sample(
            prompts, max_tokens=8, temperature=1.0, num_samples=3, seed=1, prompt_logprobs=True
        ).result()
        again = session.sample(prompts, max_tokens=8, temperature=1.0, num_samples=3, seed=1).result()
        assert [[one.tokens for one in found.answers] for found in answers] == [
            [one.tokens for one in found.answers] for found in again
        ]
        for prompt, found in zip(prompts, answers, strict=True):
            assert list(found.prompt_tokens) == prompt and len(found.answers) == 3
            for answer in found.answers:
                tokens = [*prompt, *answer.tokens]
                (trained,) = session.forward([{"tokens": tokens}]).result().logprobs
                sampled = [*found.prompt_logprobs[1:], *answer.logprobs]
                assert sampled == pytest.approx(trained[:-1], abs=1e-5)


def test_an_idle_session_gives_its_memory_back_and_continues_to_the_bit(client: Client, daemon: DaemonProcess) -> None:
    with session_of(client, idle_minutes=0.03) as session:
        session.forward_backward(rows_of(0))
        session.optim_step(1e-2).result()
        gradients = session.forward_backward(rows_of(1))
        wait_for(lambda: client.jobs.get(session.job.job_id).state == "PAUSED", 120)
        assert not daemon.worker_pids()
        assert gradients.result().loss > 0
        session.optim_step(1e-2)
        last = session.forward(rows_of(2)).result()
    with session_of(client) as session:
        for step in range(2):
            session.forward_backward(rows_of(step))
            session.optim_step(1e-2)
        assert session.forward(rows_of(2)).result() == last


def test_a_state_is_saved_and_loaded(client: Client) -> None:
    with session_of(client) as session:
        session.forward_backward(rows_of(0))
        session.optim_step(1e-2)
        saved = session.save_state("first").result()
        before = session.forward(rows_of(2)).result()
        session.forward_backward(rows_of(1))
        after = session.optim_step(1e-2).result()
        changed = session.forward(rows_of(2)).result()
        assert changed != before
        session.load_state(saved).result()
        assert session.forward(rows_of(2)).result() == before
        session.forward_backward(rows_of(1))
        assert session.optim_step(1e-2).result().grad_norm == after.grad_norm
        assert session.forward(rows_of(2)).result() == changed
        job_id = session.job.job_id
    with session_of(client) as other:
        other.load_state(saved, optimizer=False).result()
        assert other.forward(rows_of(2)).result() == before
    kept = {found.step: found for found in client.checkpoints.list(job_id)}
    assert kept[int(saved.rpartition("@")[2])].kept


def test_what_cannot_be_done_says_why_and_changes_nothing(client: Client, daemon: DaemonProcess) -> None:
    with session_of(client) as session:
        session.forward_backward(rows_of(0)).result()
        with pytest.raises(InvalidData, match=r"data\[0\].tokens has 65 tokens; it must have 1 to 64"):
            session.forward_backward([{"tokens": [5] * 65}])
        with pytest.raises(InvalidData, match=r"data\[0\].logprobs has 0 numbers for 3 tokens"):
            session.forward_backward([{"tokens": [5, 6, 7]}], loss="ppo")
        with pytest.raises(InvalidData, match="has 520 tokens, and the session was planned for 512"):
            session.forward_backward([{"tokens": [5] * 52}] * 10)
        refused = session.forward_backward([{"tokens": [5, 100_000, 7]}])
        with pytest.raises(InvalidData, match="100000"):
            refused.result()
        with pytest.raises(NotFound):
            session.load_state(f"{session.job.job_id}@7")
        session.optim_step(1e-2).result()
        with pytest.raises(InvalidData, match="has no gradients"):
            session.optim_step(1e-2).result()
        with daemon.client(daemon.user("eve")) as eve, pytest.raises(NotFound):
            eve.session(attach=session.job.job_id).__enter__()
    with pytest.raises(WrongJobState, match="SUCCEEDED: closed by its user"):
        session.optim_step(1e-2)


def test_a_program_that_ends_attaches_again(client: Client) -> None:
    with pytest.raises(ZeroDivisionError), session_of(client) as session:
        session.forward_backward(rows_of(0))
        raise ZeroDivisionError
    with client.session(attach=session.job.job_id) as again:
        again.optim_step(1e-2).result()
        found = again.forward(rows_of(2)).result()
    with session_of(client) as whole:
        whole.forward_backward(rows_of(0))
        whole.optim_step(1e-2)
        assert whole.forward(rows_of(2)).result() == found


def planes_of(daemon: DaemonProcess) -> set[str]:
    """The memory files that the session's worker has mapped, by their inodes: all places where weights can be."""
    (pid,) = daemon.worker_pids()
    maps = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {fields[4] for fields in maps if len(fields) == 6 and fields[5].startswith("/memfd:")}


def rewards_of(client: Client, *, most_steps: int, look: Callable[[], object] = lambda: None) -> list[float]:
    """The mean rewards of the steps of GRPO on a toy, until it is learned: an answer is the better, the more of its
    tokens are divisible by eight. `look` is called after every step."""
    with session_of(client, lora={"rank": 8, "alpha": 32}) as session:
        rewards: list[float] = []
        for step in range(most_steps):
            (found,) = session.sample([[5, 6, 7]], max_tokens=6, temperature=1.0, num_samples=16, seed=step).result()
            of_step = [sum(token % 8 == 0 for token in one.tokens) / len(one.tokens) for one in found.answers]
            rewards.append(sum(of_step) / len(of_step))
            if sum(rewards[-3:]) > 3 * 0.8:
                break
            rows: list[dict[str, Any]] = []
            for one, reward in zip(found.answers, of_step, strict=True):
                before = [0.0] * (len(found.prompt_tokens) - 1)
                rows.append(
                    {
                        "tokens": [*found.prompt_tokens, *one.tokens],
                        "targets": [*[-100] * len(before), *one.tokens, -100],
                        "logprobs": [*before, *one.logprobs, 0.0],
                        "advantages": [*before, *[reward - rewards[-1]] * len(one.tokens), 0.0],
                    }
                )
            session.forward_backward(rows, loss="importance_sampling")
            session.optim_step(2e-2).result()
            look()
        return rewards


def test_online_learning_raises_the_reward_the_same_way_each_time(client: Client, daemon: DaemonProcess) -> None:
    planes: list[set[str]] = []
    rewards = rewards_of(client, most_steps=100, look=lambda: planes.append(planes_of(daemon)))
    # Answers and steps are of the same memory, from the first step to the last: there is no second copy of a weight.
    assert planes[0] and all(found == planes[0] for found in planes)
    assert sum(rewards[:3]) / 3 < 0.2 and sum(rewards[-3:]) / 3 > 0.8, rewards
    assert rewards_of(client, most_steps=10) == rewards[:10]


def test_the_examples_run(client: Client, daemon: DaemonProcess, tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"It is #### {2 * n}"} for n in range(4)]
    pairs = [{"prompt": f"{n} and {n} make: ", "chosen": str(2 * n), "rejected": str(n)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    environment = os.environ | {"HORIZON_SERVER": daemon.endpoints["grpc"], "HORIZON_TOKEN": daemon.user("ada")}
    commands = (
        ["supervised.py", "--data", "rows.jsonl", "--steps", "2", "--rows", "2"],
        ["grpo.py", "--data", "rows.jsonl", "--steps", "2", "--questions", "2", "--answers", "3", "--max-tokens", "4"],
        ["dpo.py", "--data", "pairs.jsonl", "--steps", "2", "--pairs", "2"],
    )
    for name, *arguments in commands:
        done = subprocess.run(
            [sys.executable, ROOT / "examples" / name, "--model", MODEL, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert "step 2:" in done.stdout and "saved as" in done.stdout
    # Before the first step, chosen and rejected answers are as likely as for the reference.
    assert f"step 1: loss {math.log(2):.4f}" in done.stdout
