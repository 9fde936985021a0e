"""`horizond model add` beside a running daemon: the model is everybody's at once, and jobs name it by its id on the
hub."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
from tests.daemon_parts import DaemonParts
from tests.support.hub import StandInHub, served_hub

from horizon_server.errors import AlreadyExists, InvalidSpec, NotFound
from horizon_server.hub import HubModel
from horizon_server.records.account import EVERYONE, NODE
from horizon_server.services.hub_models import known_model
from horizon_server.store.model_card import base_facts

REPO = "Lab/Tiny-2M"


async def horizond(hub: StandInHub, state_dir: Path, *arguments: str) -> tuple[int, str, str]:
    """Run a command of the administrator; return its exit code and what it printed."""
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(state_dir.parent / "home"), "HF_HUB_DISABLE_XET": "1"}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "horizon_server", *arguments, "--state-dir", str(state_dir)),
        env={**os.environ, **variables, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await asyncio.wait_for(child.communicate(), 300)
    return child.returncode or 0, stdout.decode(), stderr.decode()


async def test_a_model_of_the_hub_is_shown_fetched_and_shared_beside_a_running_daemon(
    daemon: DaemonParts, model_folder: Path
) -> None:
    ada = await daemon.user("ada")
    await daemon.dataset(ada)
    # Until then the message says what an administrator runs.
    with pytest.raises(NotFound, match=r"Lab/Tiny-2M is not on this node.* horizond model add Lab/Tiny-2M"):
        await daemon.services.jobs.plan(ada, daemon.spec(model=REPO))
    with served_hub() as hub:
        repository = hub.add_folder(REPO, model_folder, card={"license": "other", "license_name": "tiny-licence"})
        refused, _, why = await horizond(hub, daemon.state_dir, "model", "add", REPO, "--yes")
        assert refused == 2
        for shown in (repository.commit, "tiny-licence", "qwen3, 2,623,424 parameters", "5.0 MiB in 6 files"):
            assert shown in why
        assert "accept it with --allow-licence tiny-licence" in why
        # Nothing but the header was fetched for that.
        assert hub.sent_bytes["model.safetensors"] <= 100_001
        add = ("model", "add", REPO, "--yes", "--allow-licence", "tiny-licence")
        code, printed, _ = await horizond(hub, daemon.state_dir, *add)
        assert (code, printed) == (0, f"{REPO}\n")
        listed = await horizond(hub, daemon.state_dir, "model", "list", "-o", "json")
    assert [(row["name"], row["shared_with"]) for row in json.loads(listed[1])] == [(REPO, "everybody")]
    record = await daemon.services.models.get(ada, REPO)
    assert (record.owner, record.shared_with, record.architecture) == (NODE.name, (EVERYONE,), "qwen3")
    folder = daemon.services.models.folder(record.model_id)
    assert (folder / "model.safetensors").read_bytes() == (model_folder / "model.safetensors").read_bytes()
    assert base_facts(folder, REPO).commit == "1" * 40
    again = HubModel(repo=REPO, commit=repository.commit, licence="", files=())
    assert await known_model(daemon.services.models, again, REPO) == record
    # Another commit would change what the name means.
    with pytest.raises(AlreadyExists, match=f"is here already, of commit {'1' * 40}, and jobs that name it"):
        await known_model(daemon.services.models, dataclasses.replace(again, commit="2" * 40), REPO)
    assert not list((daemon.state_dir / "hub").glob("*"))
    spec, plan, _ = await daemon.services.jobs.plan(ada, daemon.spec(model=REPO))
    assert spec.model == REPO and plan.fits
    # The sweep of the daemon keeps it.
    await daemon.parts.sweep.run()
    assert (folder / "config.json").is_file() and daemon.services.blobs.store.holds(record.files[0].ref)


async def test_nobody_else_can_take_the_name_of_a_model_of_the_hub(daemon: DaemonParts) -> None:
    ada = await daemon.user("ada")
    with pytest.raises(InvalidSpec, match=r"name is 'Lab/Tiny-2M'; it must be"):
        await daemon.model(ada, REPO)
