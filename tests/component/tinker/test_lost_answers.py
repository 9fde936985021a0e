"""An answer that is lost on its way is asked for again by the SDK, and nothing is done twice."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from tests.component.tinker.conftest import PATIENCE_S, data
from tests.support.daemon_process import DaemonProcess
from tests.support.pushed_state import MODEL
from tests.support.tinker_sdk import service_client
from tinker import RestClient, ServiceClient, types

CHANGES = (
    "create_session",
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "create_sampling_session",
    "load_weights",
    "asample",
)
ADAM = types.AdamParams(learning_rate=1e-2)


class Losing(ThreadingHTTPServer):
    """A proxy that passes a request on, and drops the first answer to each one that changes something."""

    daemon_threads = True

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.far = server
        self.asked_again: set[str] = set()
        """Of which an answer was lost, and the next one is not."""
        self.lost: set[str] = set()

    def handle_error(self, *_: Any) -> None:
        """A connection that ends is no news."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Losing

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        far = http.client.HTTPConnection(self.server.far, timeout=120)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        far.request(self.command, self.path, body=body, headers=headers)
        answer = far.getresponse()
        content = answer.read()
        far.close()
        call = self.path.rpartition("/")[2]
        if call in CHANGES and call not in self.server.asked_again:
            # Not by its content: the SDK numbers a sampling client anew when it sends the same call again.
            self.server.asked_again.add(call)
            self.server.lost.add(call)
            self.close_connection = True
            return
        self.server.asked_again.discard(call)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = _pass_on

    def log_message(self, *_: Any) -> None:
        """The tests look at what is done, not at what is said."""


@pytest.fixture
def losing(daemon: DaemonProcess) -> Iterator[Losing]:
    with Losing(daemon.endpoints["http"]) as proxy:
        thread = Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()


def done_by(service: ServiceClient) -> list[Any]:
    """What two steps, a saved state, a loaded one and an answer are."""
    client = service.create_lora_training_client(MODEL, rank=4, seed=1).result(PATIENCE_S)
    found: list[Any] = []
    for _ in range(2):
        computed = client.forward_backward(data(), "cross_entropy")
        client.optim_step(ADAM)
        found.append(computed.result(PATIENCE_S).metrics["loss:sum"])
    path = client.save_state("state").result(PATIENCE_S).path
    client.forward_backward(data(), "cross_entropy")
    client.optim_step(ADAM)
    with pytest.warns(FutureWarning, match="load_state"):
        client.load_state_with_optimizer(path).result(PATIENCE_S)
    found.append(client.forward(data(), "cross_entropy").result(PATIENCE_S).metrics["loss:sum"])
    sampler = client.save_weights_and_get_sampling_client().result(PATIENCE_S)
    params = types.SamplingParams(max_tokens=4, seed=1)
    answer = sampler.sample(types.ModelInput.from_ints([5, 17, 42]), 2, params).result(PATIENCE_S)
    found += [one.tokens for one in answer.sequences]
    return found


def test_what_is_sent_again_is_done_once(
    losing: Losing, service: ServiceClient, rest: RestClient, key_of: Callable[..., str]
) -> None:
    wanted = done_by(service)
    before = rest.list_training_runs(limit=1).result(60).cursor.total_count
    with service_client(losing.url, key_of()) as client:
        assert done_by(client) == wanted
    assert rest.list_training_runs(limit=1).result(60).cursor.total_count == before + 1
    assert losing.lost == set(CHANGES) - {"create_sampling_session"}
