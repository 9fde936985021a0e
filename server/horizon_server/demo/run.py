"""The demo's flow: every step is a command that a user would type, run for real and shown.

Starts a daemon of its own on loopback, and stops everything it started however it ends, Ctrl-C included.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import yaml

from horizon_server.demo.recipe import DEMO_PROMPTS, DEMO_SPEC, write_demo_dataset, write_demo_model
from horizon_server.settings import child_environment

_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 60.0
_HELD_OUT_EVERY = 10


WHAT_IT_IS = """\
horizon fine-tunes language models that are far larger than your GPU's memory, on one machine
with one GPU and a lot of RAM. It is for a lab that shares such a machine: a server runs on it, and
everybody submits jobs from a laptop. The model stays in RAM and only the layers being computed are on
the GPU; memory is planned before a job starts; results equal PyTorch."""


class DemoFailed(Exception):
    """A step of the demo did not do what it must."""


def run_demo(*, output_dir: Path, max_steps: int | None, config: Path | None, state_dir: Path | None) -> int:
    """Run the whole demo; returns 0 only when all of it happened."""
    # SIGTERM ends the demo as Ctrl-C does: through every `finally`, so that the daemon is stopped too.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    started_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="horizon-demo-") as folder:
            _demo(Path(folder), output_dir.absolute(), max_steps, config, state_dir)
    except DemoFailed as error:
        click.echo(f"demo failed: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        click.echo("interrupted; everything that the demo started is stopped", err=True)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    click.echo(f"\nThe demo has succeeded in {time.monotonic() - started_s:.0f} s. The tuned model is in {output_dir}")
    return 0


def _demo(work: Path, output_dir: Path, max_steps: int | None, config: Path | None, state_dir: Path | None) -> None:
    click.echo(WHAT_IT_IS)
    _say("1. A model and a dataset, made on the spot")
    model = work / "demo-model"
    write_demo_model(model)
    lines = write_demo_dataset(work).read_text("utf-8").splitlines(keepends=True)
    training, held_out = work / "train.jsonl", work / "held-out.jsonl"
    # Every tenth chat is kept out of the training, to see whether something was learned.
    training.write_text("".join(line for i, line in enumerate(lines) if i % _HELD_OUT_EVERY), "utf-8")
    held_out.write_text("".join(lines[::_HELD_OUT_EVERY]), "utf-8")
    spec = {**DEMO_SPEC, "model": "demo-model", "dataset": "demo-chats", "eval_dataset": "demo-held-out"}
    spec["train"] = {**spec["train"], **({"max_steps": max_steps} if max_steps else {})}
    spec_file = work / "job.yaml"
    spec_file.write_text(yaml.safe_dump(spec, sort_keys=False), "utf-8")
    _say("2. A daemon on loopback, a user and a token")
    with _daemon(state_dir or work / "state", config, work) as (endpoint, state):
        token = work / "token"
        _horizond("user", "add", "you", "--state-dir", str(state))
        token.write_text(_horizond("token", "create", "you", "--expires", "1d", "--state-dir", str(state)), "utf-8")
        environment = {"HORIZON_CONFIG_DIR": str(work / "profile")}
        _say("3. From the laptop's side: log in, push, submit")
        _horizon(environment, "login", endpoint, "--token-file", str(token))
        _horizon(environment, "model", "push", str(model), "--name", "demo-model")
        _horizon(environment, "dataset", "push", str(training), "--name", "demo-chats")
        _horizon(environment, "dataset", "push", str(held_out), "--name", "demo-held-out")
        job_id = _horizon(environment, "job", "submit", str(spec_file), "-o", "name", capture=True).strip()
        _say("4. Training, streamed through host memory")
        _horizon(environment, "job", "watch", job_id)
        _say("5. The result, back to the laptop")
        if output_dir.exists():
            # The result of an earlier demo goes, and nothing else.
            if not (output_dir / "config.json").is_file():
                raise DemoFailed(
                    f"{output_dir} exists and holds no model; move it away, or choose another --output-dir"
                )
            shutil.rmtree(output_dir)
        _horizon(environment, "checkpoint", "pull", f"{job_id}@last", "--to", str(output_dir))
        figures = _figures(environment, job_id)
    _say("6. Plain transformers, without horizon")
    _prove(model, output_dir, held_out, figures)


@contextmanager
def _daemon(state: Path, config: Path | None, work: Path) -> Iterator[tuple[str, Path]]:
    """Run a daemon of our own until the end of the block; yields its gRPC address and its state folder."""
    arguments = ["serve", "--state-dir", str(state), "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    arguments += ["--config", str(config)] if config else []
    _show("horizond", arguments)
    log = work / "horizond.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "horizon_server", *arguments],
            stdout=output,
            stderr=output,
            env=child_environment(),
            # Ctrl-C must reach the demo alone, which then stops the daemon in order.
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        # The daemon writes this file last, when it listens.
        while not (state / "endpoints.json").is_file():
            why = f"the daemon ended with exit code {process.returncode}" if process.poll() is not None else ""
            if not why and time.monotonic() >= deadline:
                why = f"the daemon was not ready after {_READY_TIMEOUT_S:.0f} s"
            if why:
                raise DemoFailed(f"{why}: {log.read_text('utf-8').strip()}")
            time.sleep(0.05)
        endpoints = json.loads((state / "endpoints.json").read_text("utf-8"))
        click.echo(f"  listening on {endpoints['grpc']} (gRPC) and http://{endpoints['http']}", err=True)
        yield endpoints["grpc"], state
    finally:
        # The daemon ends its worker itself. Only one that does not react is killed.
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _horizond(*arguments: str) -> str:
    _show("horizond", arguments)
    done = subprocess.run(
        [sys.executable, "-m", "horizon_server", *arguments],
        env=child_environment(),
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    if done.returncode:
        raise DemoFailed(f"horizond {arguments[0]} ended with exit code {done.returncode}")
    return done.stdout


def _horizon(environment: dict[str, str], *arguments: str, capture: bool = False) -> str:
    """Run the client as a user would; its progress goes to the terminal, its result is returned where `capture` is
    set."""
    if not capture:
        _show("horizon", arguments)
    done = subprocess.run(
        [sys.executable, "-m", "horizon_client", *arguments],
        env=child_environment() | environment,
        stdout=subprocess.PIPE if capture else None,
        check=False,
        text=True,
    )
    # The client is in the demo's process group: Ctrl-C has reached both.
    if done.returncode in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if done.returncode:
        raise DemoFailed(f"horizon {' '.join(arguments[:2])} ended with exit code {done.returncode}")
    return done.stdout or ""


def _figures(environment: dict[str, str], job_id: str) -> dict[str, Any]:
    """Collect the job's own figures from its event stream."""
    lines = _horizon(environment, "job", "watch", job_id, "-o", "json", capture=True).splitlines()
    events = [json.loads(line) for line in lines]
    steps = [event for event in events if "loss" in event]
    evaluations = [event for event in events if "eval_loss" in event]
    if not steps or len(evaluations) < 2:
        raise DemoFailed("the job reported no steps or no evaluations")
    job = json.loads(_horizon(environment, "job", "get", job_id, "-o", "json", capture=True))
    return {"steps": steps, "evaluations": evaluations, "job": job}


def _prove(model: Path, tuned: Path, held_out: Path, figures: dict[str, Any]) -> None:
    """Load before and after with transformers alone, compare losses, and show samples."""
    request = {"before": str(model), "after": str(tuned), "held_out": str(held_out), "prompts": list(DEMO_PROMPTS)}
    done = subprocess.run(
        [sys.executable, "-m", "horizon_server.demo.proof"],
        input=json.dumps(request),
        env=child_environment(),
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    if done.returncode:
        raise DemoFailed("the exported folder does not load in plain transformers")
    proof = json.loads(done.stdout)
    for sample in proof["samples"]:
        click.echo(
            f"\n  you:    {sample['prompt']}\n  before: {sample['before']!r:.100}\n  after:  {sample['after']!r:.160}"
        )
    _print_figures(figures, proof)
    ours, theirs = figures["evaluations"][-1]["eval_loss"], proof["loss_after"]
    if abs(ours - theirs) > 0.01 * theirs:
        raise DemoFailed(f"the exported model's loss is {theirs:.4f} in transformers, but {ours:.4f} in horizon")
    if not proof["num_ended"]:
        raise DemoFailed("no answer of the exported model ends; its generation_config.json should name <|im_end|>")
    if not theirs < 0.7 * proof["loss_before"]:
        raise DemoFailed(f"the loss did not fall clearly: {proof['loss_before']:.4f} to {theirs:.4f}")


def _print_figures(figures: dict[str, Any], proof: dict[str, Any]) -> None:
    steps, evaluations = figures["steps"], figures["evaluations"]
    tail = steps[len(steps) // 2 :]
    plan = figures["job"].get("plan", {})
    used = steps[-1].get("host_memory_bytes", {})
    parameters = sum(used.get(part, 0) for part in ("weights", "moments", "gradients"))
    rows = {
        "training loss": f"{steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f} in {steps[-1]['step']} steps",
        "held-out loss": f"{evaluations[0]['eval_loss']:.4f} -> {evaluations[-1]['eval_loss']:.4f} (horizon)",
        "same, transformers": f"{proof['loss_before']:.4f} -> {proof['loss_after']:.4f}",
        "answers that end": f"{proof['num_ended']} of {len(proof['samples'])}, at the token that ends the chats' turns",
        "tokens/s": f"{statistics.fmean(step['tokens_per_second'] for step in tail):,.0f}",
        "parameter memory": f"{parameters / 2**20:,.0f} MiB (12 bytes per parameter and 4 of gradients)",
        "host memory": f"{sum(used.values()) / 2**20:,.0f} MiB in use of "
        f"{int(plan.get('host_total_bytes', 0)) / 2**20:,.0f} MiB planned, "
        "worker included",
        "transfer overlap": f"{100 * statistics.fmean(step['overlap_ratio'] for step in tail):.1f} % of the copying "
        "was hidden",
    }
    click.echo()
    for name, value in rows.items():
        click.echo(f"  {name:<20} {value}")


def _say(text: str) -> None:
    click.secho(f"\n{text}", bold=True)


def _show(program: str, arguments: Sequence[str]) -> None:
    click.echo(f"$ {program} {shlex.join(arguments)}")
