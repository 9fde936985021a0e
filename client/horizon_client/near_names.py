"""Suggestions for misspelt names: `did you mean tiny-base?`"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from difflib import get_close_matches

from horizon_client.errors import HorizonClientError, NotFound


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean X or Y?`, or nothing when no known name is similar."""
    by_lower = {other.lower(): other for other in known}
    near = get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(by_lower[match] for match in near)}?" if near else ""


async def suggested(
    problem: NotFound, kind: str, name: str, list_names: Callable[[], Awaitable[Iterable[str]]]
) -> NotFound:
    """Return `problem` with similar names of the same kind (model, dataset, job), and the command that lists them all."""
    see = f"see: horizon {kind} list"
    text = problem.message.removesuffix(see).rstrip("; ")
    try:
        hint = did_you_mean(name, await list_names())
    except HorizonClientError:
        hint = ""  # the first problem is the one to report
    return NotFound(f"{text}; {f'{hint} {see.capitalize()}' if hint else see}", reason=problem.reason)
