"""What the routes share: who calls, and bodies."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials

from horizon_server.api.http.changes import Change
from horizon_server.api.http.middleware import admitted, services_of
from horizon_server.api.limits import address_of
from horizon_server.api.openai.bodies import Body as _Body
from horizon_server.errors import InvalidSpec, Unauthenticated
from horizon_server.services.access import require_scope
from horizon_server.services.tinker.names import MAX_ID_CHARS

_PREFIX = "tml-"
"""The SDK demands that a key begins with it."""


class Body(_Body):
    """The body of a request: nothing unknown, no type guessed. The SDK says in each what it is."""

    type: str = ""


class SequencedBody(Body):
    """The body of a call of a model."""

    model_id: str
    seq_id: int | None = None

    @property
    def sequence(self) -> int:
        """The number that the program counts its calls of the model with. Raises InvalidSpec."""
        return require_sequence(self.seq_id)


def require_sequence(seq_id: int | None) -> int:
    """Return the number of a call. Raises InvalidSpec."""
    if seq_id is None or not 1 <= seq_id < 2**31:
        raise InvalidSpec.of("seq_id", "seq_id must be 1 or more: it says which calls are the same one, sent again")
    return seq_id


async def calling(request: Request) -> Change:
    """Return who calls, when it is their turn.

    Raises:
        Unauthenticated: without a token, or with one that is wrong, expired or revoked.
        TooManyCalls: when the user makes too many calls.
        NotAllowed: with a token that is for /metrics only.
    """
    return await _of(request, is_change=False)


async def changing(request: Request) -> Change:
    """Return who makes a change, when it is their turn. Raises as `calling`."""
    return await _of(request, is_change=True)


async def _of(request: Request, *, is_change: bool) -> Change:
    key = request.headers.get("x-api-key", "")
    if not key:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
    if not key:
        raise Unauthenticated(
            "send the header 'X-API-Key: tml-TOKEN'; 'horizond token create USER' creates a token, and the SDK reads "
            "tml-TOKEN from TINKER_API_KEY"
        )
    credentials = HTTPAuthorizationCredentials(scheme="Bearer", credentials=key.removeprefix(_PREFIX))
    principal = await admitted(request, credentials, is_change=is_change)
    require_scope(principal, "read")
    origin = address_of(request.client.host if request.client else "an unknown address")
    return Change(services=services_of(request), caller=principal, origin=origin, request=request)


Calling = Annotated[Change, Depends(calling)]
Changing = Annotated[Change, Depends(changing)]


def short(text: str, name: str) -> str:
    """Return an id of a request. Raises InvalidSpec for one that nothing has."""
    if not 1 <= len(text) <= MAX_ID_CHARS or not text.isprintable():
        raise InvalidSpec.of(name, f"{name} must have 1 to {MAX_ID_CHARS} printable characters")
    return text


def notes_of(given: dict[str, Any] | None) -> dict[str, str]:
    """Return a program's notes, which are texts. Raises InvalidSpec."""
    for name, value in (given or {}).items():
        if not isinstance(value, str):
            raise InvalidSpec.of("user_metadata", f"user_metadata has {name:.40}, which is no text")
    return dict(given or {})
