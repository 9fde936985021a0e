"""Every error a user can get has its place in the one table, and a reason of its own."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import grpc
import pytest

from horizon_formats.error_table import ERRORS
from horizon_server.errors import FieldViolation, HorizonError, InvalidData, InvalidSpec


def kinds(root: type[HorizonError] = HorizonError) -> Iterator[type[HorizonError]]:
    for kind in root.__subclasses__():
        if kind.__module__ == "horizon_server.errors":  # a private refinement is reported like what it refines
            yield kind
            yield from kinds(kind)


def test_the_table_holds_every_error_and_nothing_else() -> None:
    assert sorted(ERRORS) == sorted(kind.__name__ for kind in kinds())


@pytest.mark.parametrize("kind", [*kinds()])
def test_every_entry_is_a_true_error_status(kind: type[HorizonError]) -> None:
    error = kind("a sentence", violations=[FieldViolation(field="a", description="b")], retry_after_s=1.5)
    assert grpc.StatusCode[error.status.grpc] is not grpc.StatusCode.OK
    assert 400 <= error.status.http < 600
    server_side = error.status.grpc in ("INTERNAL", "UNAVAILABLE", "UNIMPLEMENTED")
    assert server_side <= (error.status.http >= 500)
    assert any(base in kind.__mro__ for base in (ValueError, LookupError, OSError, RuntimeError, MemoryError))
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(copy), copy.message, copy.violations, copy.retry_after_s) == (
        kind,
        error.message,
        error.violations,
        1.5,
    )


def test_reasons_are_stable_words_and_unique() -> None:
    reasons = [status.reason for status in ERRORS.values()]
    assert len(set(reasons)) == len(reasons)
    assert all(reason and reason.replace("_", "").isupper() for reason in reasons)


def test_a_refinement_is_reported_like_what_it_refines() -> None:
    class BadLine(InvalidData):
        reason = "BAD_LINE"

    assert (BadLine("x").status.grpc, BadLine("x").status.http) == ("INVALID_ARGUMENT", 400)
    assert (HorizonError("x").status.grpc, HorizonError("x").status.http) == ("INTERNAL", 500)


def test_one_refused_field_is_one_call() -> None:
    error = InvalidSpec.of("train.seed", "train.seed is -1; it must be 0 or more")
    assert (type(error), error.message) == (InvalidSpec, "train.seed is -1; it must be 0 or more")
    assert error.violations == (FieldViolation(field="train.seed", description=error.message),)
