"""How `horizond gc` asks the running daemon to sweep: one file with the request, one with the answer, in the state
folder.

Both belong to the daemon's account, and nobody else can write there: no token is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
from pathlib import Path
from typing import Any

import structlog

from horizon_server.durable import replace_file
from horizon_server.errors import HorizonError, Stalled
from horizon_server.records.housekeeping import Garbage
from horizon_server.services.housekeeping.sweep import Sweep

log = structlog.get_logger(__name__)

_REQUEST = "gc-request.json"
_ANSWER = "gc-answer.json"
_POLL_S = 0.2


async def answer_request(state_dir: Path, sweep: Sweep) -> None:
    """Carry out the request that is there, if any. Called by the daemon every few seconds."""
    path = state_dir / _REQUEST
    if not path.exists():
        return
    answer: dict[str, Any]
    try:
        request = json.loads(path.read_bytes())
        path.unlink()
        answer = {"id": str(request["id"])}
        found, problem = await sweep.run(dry_run=bool(request["dry_run"]))
        answer |= {"garbage": [dataclasses.asdict(one) for one in found], "problem": problem}
        replace_file(state_dir / _ANSWER, json.dumps(answer))
    except (OSError, ValueError, KeyError, TypeError, HorizonError):
        log.exception("a request of horizond gc could not be carried out")


def ask_daemon(state_dir: Path, *, dry_run: bool, timeout_s: float) -> tuple[list[Garbage], str]:
    """Let the running daemon sweep and return what it found, and why nothing may be removed. Raises Stalled when it
    does not answer."""
    request_id = secrets.token_hex(8)
    replace_file(state_dir / _REQUEST, json.dumps({"id": request_id, "dry_run": dry_run}))
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                answer = json.loads((state_dir / _ANSWER).read_bytes())
                if answer["id"] == request_id:
                    (state_dir / _ANSWER).unlink()
                    return [Garbage(**one) for one in answer["garbage"]], answer["problem"]
            time.sleep(_POLL_S)
    finally:
        (state_dir / _REQUEST).unlink(missing_ok=True)
    raise Stalled(
        f"the daemon did not answer within {timeout_s:g} s; its log says what it does, and it sweeps every hour anyway"
    )
