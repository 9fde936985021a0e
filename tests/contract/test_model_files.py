"""Client and server agree on the files of a model folder: what is pushed is what comes back with a checkpoint."""

from __future__ import annotations

from horizon_client import model_folder
from horizon_server.store import model_files


def test_the_client_pushes_what_the_server_keeps() -> None:
    assert model_folder.COMPANION_PATTERNS == model_files.COMPANION_PATTERNS
