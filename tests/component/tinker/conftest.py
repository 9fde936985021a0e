"""A real daemon with a model, and clients of Tinker's own SDK."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_process import DaemonProcess
from tests.support.pushed_state import MODEL, PushedState
from tests.support.tinker_sdk import close_connections, rest_client, service_client, without_leaks
from tinker import RestClient, ServiceClient, TrainingClient, types

Connect = Callable[..., ServiceClient]

PATIENCE_S = 400.0
"""For what a busy machine takes to start a model."""
TEXTS = ([5, 17, 42, 7, 99, 23, 4, 61], [12, 8, 131, 77, 6], [101, 3, 3, 54, 88, 9, 40, 29, 63, 150])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK may leave connections open at any moment of these tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(autouse=True, scope="module")
def _closed_after_the_file() -> Iterator[None]:
    yield
    close_connections()


@pytest.fixture(autouse=True)
def _collected_after_each_test() -> Iterator[None]:
    yield
    with without_leaks():
        pass


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory, pushed: PushedState) -> Iterator[DaemonProcess]:
    """A daemon in which ada has pushed `demo-model`."""
    running = pushed.daemon(tmp_path_factory.mktemp("tinker") / "state")
    running.start()
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def key_of(daemon: DaemonProcess) -> Callable[..., str]:
    """A user's token as the SDK wants keys to look."""
    tokens: dict[str, str] = {}

    def key(user: str = "ada", role: str = "user") -> str:
        if user not in tokens:
            tokens[user] = daemon.user(user, role=role)
        return f"tml-{tokens[user]}"

    return key


@pytest.fixture(scope="session")
def url(daemon: DaemonProcess) -> str:
    return f"http://{daemon.endpoints['http']}"


@pytest.fixture
def connect(url: str, key_of: Callable[..., str]) -> Iterator[Connect]:
    """Make clients of users. Each has a session of its own, which ends with the test, and its models with it."""
    with ExitStack() as stack:

        def make(user: str = "ada", role: str = "user", api_key: str = "", **options: Any) -> ServiceClient:
            service = service_client(url, api_key or key_of(user, role), **options)
            stack.callback(lambda: service.close("success").result(60))
            return service

        yield make


@pytest.fixture
def service(connect: Connect) -> ServiceClient:
    """Ada's."""
    return connect()


@pytest.fixture(scope="session")
def rest(url: str, key_of: Callable[..., str]) -> RestClient:
    """Ada's."""
    return rest_client(url, key_of())


@pytest.fixture(scope="module")
def kept(url: str, key_of: Callable[..., str]) -> Iterator[ServiceClient]:
    """Ada's, for all tests of a file."""
    with service_client(url, key_of()) as service:
        yield service


@pytest.fixture(scope="module")
def model(kept: ServiceClient) -> TrainingClient:
    """A model with adapters, which the tests of a file share: each starts a process."""
    client = kept.create_lora_training_client(MODEL, rank=4, seed=1, user_metadata={"team": "blue"}).result(PATIENCE_S)
    client.save_state("start").result(PATIENCE_S)
    return client


@pytest.fixture
def adapter(model: TrainingClient) -> TrainingClient:
    """The model, as it was in the beginning."""
    return as_at_first(model)


def as_at_first(client: TrainingClient) -> TrainingClient:
    """Have a model take the weights and moments that it began with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        client.load_state_with_optimizer(f"tinker://{client.model_id}/weights/start").result(PATIENCE_S)
    return client


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    """A text of which each token is to be predicted from those before it; `inputs` are by default weights of 1."""
    given = {"target_tokens": tokens[1:], **(inputs or {"weights": [1.0] * (len(tokens) - 1)})}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


def data() -> list[types.Datum]:
    """A batch of three texts."""
    return [datum(tokens) for tokens in TEXTS]


def logprobs_of(found: types.ForwardBackwardOutput) -> list[list[float]]:
    """Of each text, those of its targets."""
    return [output["logprobs"].tolist() for output in found.loss_fn_outputs]
