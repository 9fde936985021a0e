"""Suggestions for misspelt names: `did you mean tiny-base?`"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from difflib import SequenceMatcher

from horizon_client.errors import HorizonClientError, NotFound

_SIMILAR = 0.6
_AS_SIMILAR = 0.08
_MOST_NAMES = 3


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean X or Y?` with the most similar known names, or nothing when none is similar."""
    scored = {other: SequenceMatcher(None, name.lower(), other.lower()).ratio() for other in known}
    best = max(scored.values(), default=0.0)
    near = [other for other, score in scored.items() if score >= max(_SIMILAR, best - _AS_SIMILAR)]
    near.sort(key=scored.__getitem__, reverse=True)
    return f"did you mean {' or '.join(near[:_MOST_NAMES])}?" if near else ""


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
