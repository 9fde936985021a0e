"""Logs carry the job, and never a token."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import pytest
import structlog

from horizon_server.telemetry.logs import (
    LINES_BURST,
    LOG_BURST_BYTES,
    LOG_BYTES_PER_S,
    MAX_LINE_CHARS,
    BoundedHandler,
    configure_logging,
)

TOKEN = "hzn_0123456789abcdef"


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_carries_the_bound_job() -> None:
    stream = io.StringIO()
    configure_logging("info", True, stream)
    with structlog.contextvars.bound_contextvars(job_id="job-1", attempt=2, step=7):
        structlog.get_logger("jobs").info("worker started", pid=4)
    structlog.get_logger("jobs").info("idle")
    first, second = _lines(stream)
    assert first["event"] == "worker started"
    assert (first["job_id"], first["attempt"], first["step"], first["pid"]) == ("job-1", 2, 7, 4)
    assert first["logger"] == "jobs"
    assert "job_id" not in second


def test_lines_below_the_level_are_dropped() -> None:
    stream = io.StringIO()
    configure_logging("warning", True, stream)
    structlog.get_logger().info("chatter")
    logging.getLogger("uvicorn.error").info("chatter")
    structlog.get_logger().warning("kept")
    assert [line["event"] for line in _lines(stream)] == ["kept"]


def test_calls_that_their_client_cut_leave_no_traceback() -> None:
    stream = io.StringIO()
    configure_logging("info", True, stream)
    core = logging.getLogger("grpc._cython.cygrpc")
    for error in (asyncio.CancelledError(), RuntimeError("RPC already finished."), KeyError("a bug")):
        core.error("Unexpected error", exc_info=error)
    assert ["a bug" in line["exception"] for line in _lines(stream)] == [True]


@pytest.mark.parametrize("json_lines", [True, False])
def test_no_token_reaches_a_log(json_lines: bool) -> None:
    stream = io.StringIO()
    configure_logging("debug", json_lines, stream)
    log = structlog.get_logger()
    log.info("call", authorization=f"Bearer {TOKEN}", metadata=[("authorization", f"Bearer {TOKEN}")])
    log.info(f"header was Bearer {TOKEN}, refused", headers={"Authorization": TOKEN, "accept": "*/*"})
    log.info("raw", headers=[(b"authorization", f"bearer {TOKEN}".encode())], user_token=TOKEN)
    log.info(f"curl -H 'authorization: {TOKEN}' and {{'authorization': '{TOKEN}'}}")
    logging.getLogger("somebody.elses").warning("sent %s", {"Authorization": f"Bearer {TOKEN}"})
    try:
        raise RuntimeError(f"cannot parse authorization: Bearer {TOKEN}")
    except RuntimeError:
        log.exception("failed")
        logging.getLogger("somebody.elses").exception("failed too")
    text = stream.getvalue()
    assert TOKEN not in text
    assert text.count("[hidden]") >= 8
    assert "RuntimeError" in text


def test_counts_of_tokens_are_no_secret() -> None:
    stream = io.StringIO()
    configure_logging("info", True, stream)
    structlog.get_logger().info("step", num_tokens=512, tokens_per_second=3.5, page_token="abc", step=1)
    (line,) = _lines(stream)
    assert (line["num_tokens"], line["tokens_per_second"], line["page_token"]) == (512, 3.5, "abc")


@pytest.mark.parametrize(("level", "heard"), [("info", ["bad"]), ("debug", ["chatter", "bad"])])
def test_libraries_are_heard_when_it_matters(level: str, heard: list[str]) -> None:
    stream = io.StringIO()
    configure_logging(level, True, stream)
    logging.getLogger("uvicorn.error").info("chatter")
    logging.getLogger("uvicorn.error").warning("bad")
    assert [line["event"] for line in _lines(stream)] == heard


def test_text_lines_start_with_the_time() -> None:
    stream = io.StringIO()
    configure_logging("info", False, stream)
    structlog.get_logger("jobs").info("ready", port=7)
    assert stream.getvalue().startswith("20")
    assert "ready" in stream.getvalue()
    assert "port=7" in stream.getvalue()


def test_configuring_twice_writes_each_line_once() -> None:
    stream = io.StringIO()
    configure_logging("info", True, stream)
    configure_logging("info", True, stream)
    structlog.get_logger().info("once")
    assert len(_lines(stream)) == 1


def _bounded(stream: io.StringIO, now: list[float]) -> logging.Logger:
    handler = BoundedHandler(stream, clock=lambda: now[0])
    logger = logging.Logger("front")
    logger.addHandler(handler)
    return logger


def test_lines_of_one_kind_are_few_and_the_next_one_says_how_many_were_left_out() -> None:
    stream, now = io.StringIO(), [0.0]
    configure_logging("info", True, stream)
    handler = logging.getLogger().handlers[0]
    assert isinstance(handler, BoundedHandler)
    handler._clock, handler._room_at_s = (lambda: now[0]), 0.0
    for i in range(LINES_BURST + 50):
        logging.getLogger("front").warning("a caller sent %d", i)
    structlog.get_logger("other").info("ready")
    now[0] += 2.0
    structlog.get_logger("front").info("something else")
    logging.getLogger("front").warning("a caller sent %d", -1)
    lines = _lines(stream)
    assert len(lines) == LINES_BURST + 3
    assert lines[LINES_BURST]["event"] == "ready"
    assert (lines[-1]["event"], lines[-1]["left_out"]) == ("a caller sent -1", 50)


def test_all_lines_together_have_a_limit_in_bytes_and_one_line_in_length() -> None:
    stream, now = io.StringIO(), [0.0]
    logger = _bounded(stream, now)
    for i in range(2000):
        # Kinds without number: what begins otherwise is another kind.
        logger.warning("%04d" % (i // 100) + "x" * 100_000)  # noqa: UP031
    size = len(stream.getvalue())
    assert LOG_BURST_BYTES < size < LOG_BURST_BYTES + 2 * MAX_LINE_CHARS
    assert max(map(len, stream.getvalue().splitlines())) < MAX_LINE_CHARS + 100
    now[0] += 60.0
    for _ in range(100):
        logger.warning("later %s", "x" * 1000)
    assert len(stream.getvalue()) - size < 60 * LOG_BYTES_PER_S + 2000


def test_whoever_debugs_sees_all() -> None:
    stream = io.StringIO()
    configure_logging("debug", True, stream)
    for i in range(LINES_BURST + 50):
        logging.getLogger("front").warning("a caller sent %d", i)
    assert len(_lines(stream)) == LINES_BURST + 50
