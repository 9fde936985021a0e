"""A daemon that is stopped while callers hold streams open: it ends soon, and its log has no traceback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import grpc
from tests.support.daemon_process import wait_for, wait_for_step
from tests.support.node import Node, quick_spec

from horizon_proto.v1 import job_pb2, job_pb2_grpc

NUM_STREAMS = 20
MAX_S = 180.0


def test_a_stop_with_open_streams_and_cut_calls_leaves_no_traceback(own_node: Callable[..., Node]) -> None:
    node = own_node()
    metadata = (("authorization", f"Bearer {node.token}"),)
    with node.client() as client:
        job = client.jobs.submit(quick_spec("watched", max_steps=100_000))
        wait_for_step(client, job.job_id, 2)
    host, _, port = node.daemon.endpoints["http"].rpartition(":")
    path = f"/horizon/v1/jobs/{job.job_id}/events"
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {node.token}\r\n\r\n".encode()
    pages = [socket.create_connection((host, int(port)), timeout=240) for _ in range(NUM_STREAMS)]
    with grpc.insecure_channel(node.daemon.endpoints["grpc"]) as channel:
        watch_of = job_pb2_grpc.JobServiceStub(channel).WatchJob
        watches: list[Any] = [
            watch_of(job_pb2.WatchJobRequest(job_id=job.job_id), metadata=metadata) for _ in range(2 * NUM_STREAMS)
        ]
        for page in pages:
            page.sendall(request)
        for page, watch in zip(pages, watches[:NUM_STREAMS], strict=True):
            assert page.recv(10)
            next(watch)
        for watch in watches[NUM_STREAMS:]:
            watch.cancel()
        for page in pages[: NUM_STREAMS // 2]:
            page.close()
        ended = threading.Event()
        channel.subscribe(lambda state: ended.set() if state is not grpc.ChannelConnectivity.READY else None)
        assert node.daemon.terminate(MAX_S) == 0
        wait_for(ended.is_set, MAX_S)
    for page in pages:
        page.close()
    log = node.daemon.log()
    assert "Traceback" not in log, log
    assert "stopped" in log
