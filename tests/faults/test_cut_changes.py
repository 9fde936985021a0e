"""Changes that a kill -9 of the daemon cuts: the audit log names each that was made."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence

import grpc
import pytest
from tests.support.node import Node, quick_spec

from horizon_proto.v1 import job_pb2, job_pb2_grpc

NUM_JOBS = 9


@pytest.mark.timeout(600)
def test_every_change_that_a_kill_cuts_is_in_the_audit_log(own_node: Callable[..., Node]) -> None:
    node = own_node()
    cancelled: set[str] = set()
    for num_before in (1, 5):
        with node.client() as client:
            job_ids = [client.jobs.submit(quick_spec("cut", max_steps=100_000)).job_id for _ in range(NUM_JOBS)]
        begun = threading.Event()
        thread = threading.Thread(target=cancel_until_cut, args=(node, job_ids, num_before, begun))
        thread.start()
        assert begun.wait(240)
        node.daemon.kill()
        thread.join(240)
        assert not thread.is_alive()
        node.daemon.start()
        with node.client() as client:
            cancelled |= {job_id for job_id in job_ids if client.jobs.get(job_id).state in ("CANCELLED", "STOPPING")}
            entries = json.loads(node.daemon.admin("audit", "-o", "json"))
            named = {entry["resource"] for entry in entries if entry["action"] == "JobService.CancelJob"}
            assert cancelled <= named
            for job_id in job_ids:  # so that the next round begins without them
                client.jobs.cancel(job_id)
    assert len(cancelled) >= 1 + 5


def cancel_until_cut(node: Node, job_ids: Sequence[str], num_before: int, begun: threading.Event) -> None:
    """Cancel one job after the other by raw calls, which are not made again; tell when some have been answered."""
    metadata = (("authorization", f"Bearer {node.token}"),)
    with grpc.insecure_channel(node.daemon.endpoints["grpc"]) as channel:
        stub = job_pb2_grpc.JobServiceStub(channel)
        for number, job_id in enumerate(job_ids, 1):
            try:
                stub.CancelJob(job_pb2.CancelJobRequest(job_id=job_id), metadata=metadata, timeout=240)
            except grpc.RpcError:
                return
            if number == num_before:
                begun.set()
