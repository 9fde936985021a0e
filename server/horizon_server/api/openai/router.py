"""All routes below /v1. They are not in the daemon's own schema: OpenAI's describes them."""

from __future__ import annotations

from fastapi import APIRouter

from horizon_server.api.openai import chat, completions, files, fine_tuning, models

router = APIRouter()
for part in (files, fine_tuning, models, completions, chat):
    router.include_router(part.router, include_in_schema=False)
