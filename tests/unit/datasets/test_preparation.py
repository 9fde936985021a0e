"""The key of a prepared dataset, and the request that crosses to the child."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from horizon_formats.formats import DatasetFormat
from horizon_server.codec import from_json, to_json
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareRequest, prepared_folder, tokenizer_digest
from horizon_server.errors import InvalidModel


def test_every_part_changes_the_key_and_the_order_of_the_map_does_not() -> None:
    base = PrepareOptions(format=DatasetFormat.PROMPT_COMPLETION, field_map={"prompt": "q", "completion": "a"})
    swapped = PrepareOptions(format=DatasetFormat.PROMPT_COMPLETION, field_map={"completion": "a", "prompt": "q"})
    assert prepared_folder(Path("p"), "d", "t", base) == prepared_folder(Path("p"), "d", "t", swapped)
    others = [
        PrepareOptions(format=DatasetFormat.MESSAGES, field_map=base.field_map),
        PrepareOptions(format=base.format, field_map={"prompt": "q"}),
        PrepareOptions(format=base.format, field_map=base.field_map, method="pretrain"),
        PrepareOptions(format=base.format, field_map=base.field_map, sequence_length=512),
        PrepareOptions(format=base.format, field_map=base.field_map, train_on="all"),
        PrepareOptions(format=base.format, field_map=base.field_map, eval_fraction=0.5),
    ]
    keys = {prepared_folder(Path("p"), "d", "t", options) for options in [base, *others]}
    keys |= {prepared_folder(Path("p"), "d2", "t", base), prepared_folder(Path("p"), "d", "t2", base)}
    assert len(keys) == 9


def test_the_tokenizer_digest_follows_the_files_that_matter(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="holds no tokenizer"):
        tokenizer_digest(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    first = tokenizer_digest(tmp_path)
    (tmp_path / "model.safetensors").write_text("weights")
    assert tokenizer_digest(tmp_path) == first
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_digest(tmp_path) != first


def test_a_request_survives_the_way_to_the_child(tmp_path: Path) -> None:
    request = PrepareRequest(
        dataset_files=(StoredFile.at(tmp_path / "00ff", name="chats.jsonl"),),
        model_dir=tmp_path / "model",
        output_dir=tmp_path / "out",
        options=PrepareOptions(
            field_map={"prompt": "q"}, train_on="last-assistant", sequence_length=77, eval_fraction=0.1
        ),
        num_rows=9,
    )
    assert from_json(PrepareRequest, to_json(request)) == request


def test_what_the_daemon_imports_loads_no_tensor_library() -> None:
    modules = "checking, preview, reading, recipe"
    program = (
        f"import sys; from horizon_server.datasets import {modules}; "
        "print(*(name for name in ('torch', 'transformers', 'tokenizers', 'numpy', 'jinja2') if name in sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert loaded.stdout.strip() == ""
