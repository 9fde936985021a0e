"""A model of the hub becomes one of this node: checked before its weights are fetched, then kept and shared as pushed
models are.

Runs in the process of `horizond model add`, beside a running daemon or without one: everything that the two could both
change is a transaction of the database or a rename.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from horizon_server.errors import AlreadyExists, NotFound
from horizon_server.hub import HubModel
from horizon_server.records.account import EVERYONE, NODE
from horizon_server.records.blob import BlobFile, ModelRecord
from horizon_server.services.model_check import ModelFacts, check_folder
from horizon_server.services.pushed import ModelService
from horizon_server.services.uploads import Uploads
from horizon_server.store.model_card import base_facts

TryModel = Callable[[Path], Awaitable[None]]


async def check_outline(folder: Path, trial: TryModel) -> ModelFacts:
    """Return what the outline of a model says of it, after a trial of its class. Raises InvalidModel: it cannot be
    trained, and the message says why."""
    facts = await asyncio.to_thread(check_folder, folder)
    await trial(folder)
    return facts


async def known_model(models: ModelService, model: HubModel, name: str) -> ModelRecord | None:
    """Return the node's own model of that name, None where there is none. Raises AlreadyExists: it is of another
    repository or commit."""
    try:
        record = await models.get(NODE, name)
    except NotFound:
        return None
    if record.owner != NODE.name or not record.ready:
        return None
    source = base_facts(models.folder(record.model_id), name)
    if (source.repo, source.commit) != (model.repo, model.commit):
        raise AlreadyExists(
            f"model {name} is here already, of commit {source.commit or 'unknown'}, and jobs that name it mean "
            f"that one: choose another name (--name), or have an admin delete it first (horizon model delete {name})"
        )
    return record


async def add_model(
    models: ModelService, uploads: Uploads, files: Sequence[BlobFile], *, name: str, folder: Path
) -> ModelRecord:
    """Keep the files of `folder`, which is on the disk of the state folder, as a model of the node, shared with
    everybody.

    Raises:
        InvalidModel, TooLarge: as a push of the same folder does.
        AlreadyExists: the name is taken by other content.
    """
    record = await models.create(NODE, request_id=secrets.token_hex(16), name=name, files=files)
    if not record.ready:
        await uploads.store.adopt(NODE.name, {file.ref: folder / file.path for file in files})
        record = await models.finalize(NODE, record.id)
    return await models.share(NODE, record.id, EVERYONE)
