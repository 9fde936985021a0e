"""Who calls: the same bearer tokens as gRPC."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from horizon_server.api.http.ports import HttpServices
from horizon_server.errors import Unauthenticated
from horizon_server.records.account import Principal

_bearer = HTTPBearer(auto_error=False, description="A token from `horizond token create USER`.")


def services_of(request: Request) -> HttpServices:
    """Return the services that the app was made with."""
    return cast(HttpServices, request.app.state.services)


async def authenticated(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Principal:
    """Return the caller.

    Raises:
        Unauthenticated: without a token, or with one that is wrong, expired or revoked.
    """
    if credentials is None:
        raise Unauthenticated(
            "send the header 'Authorization: Bearer TOKEN'; 'horizond token create USER' makes a token"
        )
    return await services_of(request).accounts.authenticate(credentials.credentials)


Caller = Annotated[Principal, Depends(authenticated)]
Services = Annotated[HttpServices, Depends(services_of)]
