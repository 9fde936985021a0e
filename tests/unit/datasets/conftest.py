"""Model folders whose tokenizers the tests read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from horizon_server.demo.recipe import write_demo_model

TINY_BASE = Path(__file__).parents[4] / "shared" / "models" / "tiny-base"


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture(scope="session")
def bare_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tokenizer without its chat template."""
    folder = tmp_path_factory.mktemp("models") / "bare"
    shutil.copytree(demo_model, folder)
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.fixture(scope="session")
def tiny_base() -> Path:
    if not TINY_BASE.is_dir():
        pytest.skip(f"needs the model {TINY_BASE}, which is not part of the repository")
    return TINY_BASE


@pytest.fixture(scope="session")
def qwen_class_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose tokenizer class brings its own pre-tokenizer, whatever tokenizer.json says."""
    folder = tmp_path_factory.mktemp("models") / "qwen"
    shutil.copytree(demo_model, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    return folder
