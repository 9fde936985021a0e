"""Callers with or without a token who try to take the service from the others, against a real daemon.

Each attack comes from a process of its own. Meanwhile another user's calls are answered, and the log stays small.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.faults.attacks import ATTACKS, NUM_BAD_REQUESTS
from tests.support.daemon_process import DaemonProcess, wait_for_step
from tests.support.node import quick_spec

from horizon_client import Client
from horizon_client.connection import RetryPolicy
from horizon_server.demo.recipe import write_demo_dataset, write_demo_model
from horizon_server.network import own_certificate
from horizon_server.settings import Settings

ATTACK_S = 4.0
ROUNDS = 8
WINDOW_S = 4.0
# Of the steps a second of a running job. Wanted are 0.95; on two cores, both of which the job uses, half requests and a
# flood of calls cost it about a quarter.
MIN_RATIO = 0.5
# The same where another user's small jobs are loaded. Wanted are 0.8, which `bench.loading` measures; here other tests
# may run beside it.
MIN_LOADED_RATIO = 0.35
MAX_RESIDENT = Settings.model_fields["max_resident_jobs"].default
# A connection that is cut is made again after the pause, and all of that counts in how long the call took.
AGAIN_S, LONGEST_CALL_S = 0.01, 120.0
SHARE_S = 0.3
"""Of the processor, long enough for the others to have had their turns too."""
# The machine is shared with the attacker, who runs at the lowest priority. Of a process that has a processor to itself:
# see `share_of_a_processor`.
P99_S = 1.0
MAX_LOG_BYTES = 256 * 1024


class Attacked:
    """A daemon with two users: ada, who works, and eve, who attacks."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.daemon = DaemonProcess(folder / "state", **settings).start()
        # The usual limit of a login's processes.
        resource.prlimit(self.daemon.pid, resource.RLIMIT_NOFILE, (1024, 1024))
        self.ada, self.eve = self.daemon.user("ada"), self.daemon.user("eve")

    @contextmanager
    def under(
        self, attack: str, *, token: str = "", seconds: float = ATTACK_S, web: str = "http"
    ) -> Iterator[dict[str, int]]:
        """Attack during the block, which may end earlier; the counts of the attack are filled in at the end."""
        counts: dict[str, int] = {}
        endpoints = self.daemon.endpoints
        command = [sys.executable, "-m", "tests.faults.attacks", attack, endpoints["grpc"], endpoints[web], token]
        with subprocess.Popen(
            [*command, str(seconds)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                yield counts
                counts |= json.loads(process.communicate(timeout=240)[0])
            finally:
                process.kill()

    def log_bytes(self) -> int:
        return (self.daemon.state_dir / "test.log").stat().st_size


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    world = Attacked(tmp_path_factory.mktemp("starving"))
    try:
        yield world
    finally:
        world.daemon.close()


def p99_s(durations: list[float]) -> float:
    return sorted(durations)[int(len(durations) * 0.99)]


def share_of_a_processor() -> float:
    """What a process gets of a processor by what else runs, at most 1: a call, in which several processes compute one
    after the other, takes as much longer."""
    started, began_s = time.perf_counter(), time.thread_time()
    while (used_s := time.thread_time() - began_s) < SHARE_S:
        pass
    return min(1.0, used_s / (time.perf_counter() - started))


def calls_of_another(world: Attacked, seconds: float) -> list[float]:
    """Durations of ada's calls: gRPC on a connection that she has, on new ones, and REST."""
    durations: list[float] = []
    until = time.monotonic() + seconds
    with patient_client(world) as client:
        while time.monotonic() < until:
            for call in (client.node.status, lambda: new_connection(world), lambda: rest(world)):
                started = time.perf_counter()
                call()
                durations.append(time.perf_counter() - started)
    return durations


def new_connection(world: Attacked) -> None:
    with patient_client(world) as client:
        client.jobs.list(limit=1)


def patient_client(world: Attacked) -> Client:
    """A client of ada that tries again for as long as `rest` does: its connection may be among those that are cut."""
    policy = RetryPolicy(max_attempts=1000, max_elapsed_s=LONGEST_CALL_S, first_wait_s=AGAIN_S, longest_wait_s=0.1)
    return Client(world.daemon.endpoints["grpc"], token=world.ada, unary_retry=policy)


def rest(world: Attacked) -> None:
    """Call REST. A connection that is cut before its answer is made again, as browsers do: the attacker calls from the
    same address."""
    request = urllib.request.Request(  # our own daemon
        f"http://{world.daemon.endpoints['http']}/horizon/v1/node", headers={"Authorization": f"Bearer {world.ada}"}
    )
    until = time.monotonic() + LONGEST_CALL_S
    # The newest connections of an address are kept, and under half requests the attacker's are as new as this one: of
    # 509 calls 3 were cut, under connections to gRPC none of 292. Not a number of tries: a hundred take a moment, or
    # seconds, by how busy the machine is.
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(request, timeout=LONGEST_CALL_S) as answer:  # noqa: S310
                assert answer.status == 200
                return
        except ConnectionError:
            pass
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
        time.sleep(AGAIN_S)
    raise AssertionError(f"the connection was cut again and again for {LONGEST_CALL_S:g} s")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("attack", "with_token"),
    [*((name, False) for name in ATTACKS if name != "flood"), ("silent_calls", True), ("flood", True)],
)
def test_others_are_served_and_the_log_stays_small(attacked: Attacked, attack: str, with_token: bool) -> None:
    before = attacked.log_bytes()
    worst_s: list[float] = []
    # The machine may be busy with something else: an attack that starves others does so every time. The share is that
    # without the attack.
    while not worst_s or (worst_s[-1] >= P99_S and len(worst_s) < ROUNDS):
        share = share_of_a_processor()
        with attacked.under(attack, token=attacked.eve if with_token else "") as counts:
            durations = calls_of_another(attacked, ATTACK_S - 2.0)
        share = (share + share_of_a_processor()) / 2
        worst_s.append(p99_s(durations) * share)
    assert worst_s[-1] < P99_S, (attack, worst_s, counts)
    assert attacked.log_bytes() - before < MAX_LOG_BYTES


@pytest.mark.alone
@pytest.mark.further
@pytest.mark.timeout(900)
def test_the_running_job_is_not_slowed(tmp_path: Path) -> None:
    """Windows with and without an attack take turns in one run, so that what else the machine does is in both."""
    # A user's calls take their share of all processors, and here there may be two: at the default's 100 a second they
    # may take more.
    attacked = Attacked(tmp_path, max_calls_per_s=20)
    try:
        slowest = slowest_steps(attacked)
    finally:
        attacked.daemon.close()
    assert min(slowest.values()) >= MIN_RATIO, slowest


def slowest_steps(attacked: Attacked) -> dict[str, float]:
    """Steps a second under each attack, of those without; of several rounds the one with the least else on the
    machine."""
    files = attacked.daemon.state_dir.parent / "files"
    model, rows = write_demo_model(files / "model"), write_demo_dataset(files)
    with attacked.daemon.client(attacked.ada) as client:
        client.models.push(model, name="demo-model")
        client.datasets.push([rows], name="demo-chats")
        job_id = client.jobs.submit(quick_spec("steady", max_steps=1_000_000, tokens_per_step=2048)).job_id
        wait_for_step(client, job_id, 5)

        def steps_per_s() -> float:
            started, first = time.monotonic(), client.jobs.get(job_id).step
            time.sleep(WINDOW_S)
            return (client.jobs.get(job_id).step - first) / (time.monotonic() - started)

        slowest: dict[str, float] = {}
        for attack, token in (("health_watches", ""), ("half_requests", ""), ("wrong_tokens", ""), ("flood", "eve")):
            ratios: list[float] = []
            while len(ratios) < ROUNDS and (not ratios or max(ratios) < MIN_RATIO):
                before = steps_per_s()
                with attacked.under(attack, token=attacked.eve if token else "", seconds=WINDOW_S + 1):
                    during = steps_per_s()
                ratios.append(during / ((before + steps_per_s()) / 2))
            slowest[attack] = max(ratios)
        assert client.jobs.get(job_id).state == "RUNNING"
        client.jobs.cancel(job_id)
    return slowest


@pytest.mark.alone
@pytest.mark.further
@pytest.mark.timeout(900)
def test_a_running_job_is_not_stopped_by_the_small_jobs_of_another(tmp_path: Path) -> None:
    """Eve submits sixty jobs of one step. Without a bound they were loaded all at once, and ada's job had a tenth of
    its steps."""
    attacked = Attacked(tmp_path)
    files = tmp_path / "files"
    model, rows = write_demo_model(files / "model"), write_demo_dataset(files)
    try:
        with attacked.daemon.client(attacked.ada) as ada, attacked.daemon.client(attacked.eve) as eve:
            for client in (ada, eve):
                client.models.push(model, name="demo-model")
                client.datasets.push([rows], name="demo-chats")
            job_id = ada.jobs.submit(quick_spec("steady", max_steps=1_000_000, tokens_per_step=2048)).job_id
            wait_for_step(ada, job_id, 5)

            def steps_per_s(seconds: float) -> float:
                started, first = time.monotonic(), ada.jobs.get(job_id).step
                most = 0
                while time.monotonic() - started < seconds:
                    most = max(most, len(attacked.daemon.worker_pids()))
                    time.sleep(0.2)
                # Ada's worker, two of eve's that are being loaded and those that wait for their first turn or are
                # ending.
                assert most <= 1 + MAX_RESIDENT
                return (ada.jobs.get(job_id).step - first) / (time.monotonic() - started)

            before = steps_per_s(2 * WINDOW_S)
            submitted = [eve.jobs.submit(quick_spec("small", max_steps=1)).job_id for _ in range(60)]
            during = steps_per_s(4 * WINDOW_S)
            for one in submitted:
                eve.jobs.cancel(one)
            assert during > MIN_LOADED_RATIO * before, (before, during)
            ada.jobs.cancel(job_id)
    finally:
        attacked.daemon.close()


@pytest.mark.parametrize("port", ["grpc", "http"])
def test_what_is_not_tls_does_not_fill_the_log(tmp_path: Path, port: str) -> None:
    authority = own_certificate(tmp_path, ()).authority
    # Which makes the daemon speak TLS on loopback too.
    world = Attacked(tmp_path, tls_client_ca=str(authority))
    try:
        before = world.log_bytes()
        with world.under("bad_requests", web=port, seconds=3.0) as counts:
            pass
        assert sum(counts.values()) >= NUM_BAD_REQUESTS
        assert world.log_bytes() - before < MAX_LOG_BYTES
        # gRPC's core writes a line for each handshake that fails unless the daemon keeps it from that.
        assert "Handshake failed" not in world.daemon.log()
    finally:
        world.daemon.close()
