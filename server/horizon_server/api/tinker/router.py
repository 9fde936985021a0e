"""All routes below /api/v1. They are not in the daemon's own schema: Tinker's describes them."""

from __future__ import annotations

from fastapi import APIRouter

from horizon_server.api.tinker import futures, runs, sampling, service, training

router = APIRouter()
for part in (service, training, futures, sampling, runs):
    router.include_router(part.router, include_in_schema=False)
router.include_router(service.unserved, include_in_schema=False)
