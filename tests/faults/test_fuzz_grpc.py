"""Every method of the contract under raw, random and mutated requests: no internal error, and nothing of another user's
in an answer."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from tests.support.fuzz_world import ADMIN, CALLER, NUM_CASES, FuzzWorld, fuzz_world
from tests.support.messages import Requests

import horizon_proto.v1
from horizon_server.api.grpc.server import SERVICE_NAMES

# A stream may follow a job that never ends: the client leaves it after this time.
_STREAM_S = 0.3
_UNARY_S = 180.0
_MOST_ANSWERS = 20
_LEAVES = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
# DEADLINE_EXCEEDED: there was no answer in time.
_DEFECTS = {
    getattr(grpc.StatusCode, name)
    for name in ("INTERNAL", "UNKNOWN", "DATA_LOSS", "DEADLINE_EXCEEDED", "UNAUTHENTICATED", "UNAVAILABLE")
}


def _methods() -> Iterator[Any]:
    for module in pkgutil.iter_modules(horizon_proto.v1.__path__):
        if module.name.endswith("_pb2"):
            contract = importlib.import_module(f"horizon_proto.v1.{module.name}")
            for service in contract.DESCRIPTOR.services_by_name.values():
                yield from service.methods


METHODS = {f"/{method.containing_service.full_name}/{method.name}": method for method in _methods()}


@pytest.fixture
def world(tmp_path: Path, model_folder: Path) -> Iterator[FuzzWorld]:
    with fuzz_world(tmp_path / "state", model_folder) as made:
        yield made


class _Channel:
    """Sends bytes to any method as one user."""

    def __init__(self, world: FuzzWorld, token: str | None) -> None:
        self._channel = grpc.insecure_channel(world.daemon.endpoints["grpc"])
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def __enter__(self) -> _Channel:
        return self

    def __exit__(self, *raised: object) -> None:
        self._channel.close()

    def send(self, path: str, requests: list[bytes], *, stream_s: float = _STREAM_S) -> tuple[grpc.StatusCode, bytes]:
        """Return the status, and all that the answer says: messages, status message and trailers."""
        method = METHODS[path]
        shape = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        call = getattr(self._channel, shape)(path)
        given = iter(requests) if method.client_streaming else requests[0]
        timeout_s = stream_s if method.server_streaming else _UNARY_S
        said = b""
        try:
            answer = call(given, metadata=self._metadata, timeout=timeout_s)
            if not method.server_streaming:
                return grpc.StatusCode.OK, answer
            for number, part in enumerate(answer):
                said += part
                if number == _MOST_ANSWERS:
                    answer.cancel()
        except grpc.RpcError as error:
            given_trailers: Any = error.trailing_metadata() or ()
            trailers = b"".join(v if isinstance(v, bytes) else v.encode() for _, v in given_trailers)
            code = error.code()
            if method.server_streaming and code in _LEAVES:
                return grpc.StatusCode.OK, said
            return code, said + (error.details() or "").encode() + trailers
        return grpc.StatusCode.OK, said


def _requests(make: Requests, kind: type[Message], number: int) -> list[bytes]:
    """One message, or several for methods that take a stream."""
    makers = (make.raw, make.random, make.mutated, make.plausible, make.mutated)
    made = [makers[(number + i) % len(makers)](kind) for i in range(1 + number % 3)]
    return [one if isinstance(one, bytes) else one.SerializeToString() for one in made]


def _fuzz(world: FuzzWorld, user: str, num_cases: int, *, seed: int) -> Counter[grpc.StatusCode]:
    make = Requests(seed, world.known)
    codes: Counter[grpc.StatusCode] = Counter()
    defects: dict[str, str] = {}
    with _Channel(world, world.tokens[user]) as channel:
        for number in range(num_cases):
            path = sorted(METHODS)[number % len(METHODS)]
            method = METHODS[path]
            kind = GetMessageClass(method.input_type)
            requests = _requests(make, kind, number // len(METHODS))
            code, said = channel.send(path, requests)
            codes[code] += 1
            sent = requests if method.client_streaming else requests[:1]
            about = (
                f"case {number} of seed {seed}, {path} of {[one.hex()[:2000] for one in sent]}: {code} {said[:500]!r}"
            )
            if method.name.startswith("Delete") and code is grpc.StatusCode.OK:
                world.replace_deleted()
                make.known = world.known
            leaks = world.leaks(said) if user == CALLER else []
            if leaks or code in _DEFECTS:
                defects[path] = f"{about} {f'shows {leaks}' if leaks else ''}"
    assert not defects, "\n".join(defects.values())
    return codes


def test_every_service_of_the_contract_is_served() -> None:
    assert {method.containing_service.full_name for method in METHODS.values()} == set(SERVICE_NAMES)


@pytest.mark.timeout(300 + NUM_CASES)
def test_no_request_of_a_user_fails_inside_or_shows_or_changes_what_is_another_users(world: FuzzWorld) -> None:
    before = world.state_of_other()

    codes = _fuzz(world, CALLER, NUM_CASES, seed=1)

    assert world.state_of_other() == before
    # The requests get past the first check: some succeed, some name what is not there.
    assert codes[grpc.StatusCode.OK] > 0.05 * NUM_CASES, codes
    assert codes[grpc.StatusCode.NOT_FOUND] > 0.05 * NUM_CASES, codes


@pytest.mark.timeout(300 + NUM_CASES)
def test_no_request_of_an_admin_fails_inside(world: FuzzWorld) -> None:
    codes = _fuzz(world, ADMIN, max(1, NUM_CASES // 4), seed=2)
    assert codes[grpc.StatusCode.OK], codes


def test_no_method_answers_without_a_token(world: FuzzWorld) -> None:
    make = Requests(3, world.own)
    for token in (None, "x" * 43):
        with _Channel(world, token) as channel:
            for path, method in METHODS.items():
                kind = GetMessageClass(method.input_type)
                for requests in ([make.raw(kind)], [make.plausible(kind).SerializeToString()]):
                    code, said = channel.send(path, requests, stream_s=_UNARY_S)
                    # Of an address that has presented too many wrong tokens, none is looked at any more.
                    refused = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED
                    assert code in refused, f"{path}: {code} {said!r}"
