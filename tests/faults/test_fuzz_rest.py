"""Every REST operation of the OpenAPI document under valid, broken and aimed requests: no 5xx, nothing of another
user's, and the answers that the document promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.support.fuzz_world import CALLER, NUM_CASES, FuzzWorld, fuzz_world

_CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
_ODD_KEYS = (
    "..",
    "../..",
    "%2e%2e",
    "a/b",
    "\0",
    "\u202e",
    "\u00b2",
    "x" * 64,
    "x" * 5000,
    "job_",
    "' OR 1=1 --",
    "{{7*7}}",
)
_ODD_TOKENS = (
    "OTk5OTk5OTk5OTk5OTk5OTk5OTk5",
    "WzEuMCwgIlx1ZDgwMCJd",
    "LTE=",
    "W10=",
    "====",
    "_" * 201,
    "eyJhIjogMX0",
    "\u00b2",
)
_ODD_NUMBERS = (
    "-1",
    "0",
    "9223372036854775807",
    "9223372036854775808",
    "1e9",
    "nan",
    " 1",
    "1_0",
    "0x10",
    "\u0663",
    "9" * 400,
)
_STREAM = "/horizon/v1/stream"
_KINDS = {"job_id": "job_id", "name": "dataset", "model": "model"}
# They show nothing of the daemon's work; probes and load balancers have no token.
_OPEN = {"/healthz", "/readyz", "/version", "/metrics"}


@pytest.fixture
def world(tmp_path: Path, model_folder: Path) -> Iterator[FuzzWorld]:
    with fuzz_world(tmp_path / "state", model_folder) as made:
        yield made


@pytest.fixture
def session(world: FuzzWorld) -> Iterator[requests.Session]:
    with requests.Session() as made:
        made.trust_env = False
        yield made


def _operations(world: FuzzWorld) -> list[Any]:
    """All that the document has; what changes something comes last: a job that waits again has events without an
    end."""
    url = f"http://{world.daemon.endpoints['http']}/openapi.json"
    schema = schemathesis.openapi.from_url(url)
    found: list[Any] = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    return sorted(found, key=lambda operation: operation.method.upper() != "GET")


def _aims(world: FuzzWorld, operation: Any) -> st.SearchStrategy[dict[str, str]]:
    """Values that a schema does not lead to: what exists, of both users, and what has broken servers before."""
    aims: dict[str, st.SearchStrategy[str]] = {}
    for parameter in [*operation.path_parameters, *operation.query]:
        name = parameter.name
        if name in _KINDS:
            # The events of a job that waits have no end.
            known = [*world.own[_KINDS[name]], *world.others[_KINDS[name]]]
            usable = [key for key in known if name != "job_id" or key != world.own["job_id"][-1]]
            aims[name] = st.sampled_from([*usable, *usable, *_ODD_KEYS])
        elif name == "page_token":
            aims[name] = st.sampled_from(_ODD_TOKENS)
        else:
            aims[name] = st.sampled_from(_ODD_NUMBERS)
    return st.fixed_dictionaries({}, optional=aims)


def _run(num_cases: int, check: Callable[[Any, dict[str, str]], None], **strategies: Any) -> None:
    @hypothesis.settings(
        max_examples=num_cases,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(**strategies)
    def run(case: Any, aims: dict[str, str]) -> None:
        check(case, aims)

    run()


def _aim(case: Any, aims: dict[str, str]) -> None:
    for name, value in aims.items():
        given = case.path_parameters if name in case.path_parameters else case.query
        given[name] = value


@pytest.mark.timeout(300 + NUM_CASES)
def test_no_request_of_a_user_fails_inside_or_shows_what_is_another_users(
    world: FuzzWorld, session: requests.Session
) -> None:
    load_all_checks()
    # The stream of a page has no end; its own tests have what it takes.
    operations = [operation for operation in _operations(world) if operation.path != _STREAM]
    before = world.state_of_other()
    headers = {"Authorization": f"Bearer {world.tokens[CALLER]}"}
    codes: set[int] = set()

    def check(case: Any, aims: dict[str, str]) -> None:
        _aim(case, aims)
        answer = case.call(session=session, headers=headers, timeout=180)
        about = f"{answer.request.method} {answer.request.url}"
        codes.add(answer.status_code)
        assert not world.leaks(answer.content), f"{about}: {answer.content[:2000]!r}"
        is_others = any(aims.get(name) in world.others[kind] for name, kind in _KINDS.items())
        assert not (is_others and answer.status_code < 300), f"{about}: {answer.status_code}"
        case.validate_response(answer, checks=_CHECKS)

    # An operation without parameters has one request only.
    rich = [one for one in operations if one.path_parameters or one.query or one.body]
    for operation in operations:
        for mode in (
            (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if operation in rich else (GenerationMode.POSITIVE,)
        ):
            _run(
                -(-NUM_CASES // (2 * len(rich))),
                check,
                case=operation.as_strategy(generation_mode=mode),
                aims=_aims(world, operation),
            )

    assert world.state_of_other() == before
    # The requests get past the first check: some succeed, some name what is not there or make no sense.
    assert {200, 400, 404, 422} <= codes


def test_no_route_answers_without_a_token_but_those_for_probes(world: FuzzWorld, session: requests.Session) -> None:
    for operation in _operations(world):
        path = operation.path
        url = f"http://{world.daemon.endpoints['http']}{path}".replace("{job_id}", "job").replace("{name}", "chats")
        url = url.replace("{step}", "5")
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = session.request(operation.method, url, headers=headers, timeout=180)
            # /metrics looks at a token that is given: with one it shows more.
            is_open = path in _OPEN and not (headers and path == "/metrics")
            # 429: of an address that has presented too many wrong tokens, none is looked at any more.
            assert (answer.status_code in (401, 429)) is not is_open, (operation.method, path, answer.status_code)
