"""Which rows are held out: a share of them, decided by their content alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horizon_formats.formats import DatasetFormat
from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareRequest
from horizon_server.datasets.tokens.rendering import is_held_out, normalise, row_content
from horizon_server.engine.data import PreparedDataset
from horizon_server.errors import InvalidData


def sides(model: Path, folder: Path, rows: list[dict[str, Any]], fraction: float) -> tuple[set[str], set[str], Any]:
    """Return the first words of the rows on either side, as they came out of the preparation, and its report."""
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = PrepareRequest(
        dataset_files=(StoredFile.at(folder / "rows.jsonl"),),
        model_dir=model,
        output_dir=folder / "out",
        options=PrepareOptions(sequence_length=64, eval_fraction=fraction),
    )
    report = prepare(request, on_progress=lambda done: None)
    found = []
    for place in (folder / "out", folder / "out" / "evaluation"):
        dataset = PreparedDataset.open(place)
        documents = [dataset.micro_batch([number]) for number in range(dataset.num_documents)]
        found.append({tuple(document.input_ids_T.tolist()) for document in documents})
    assert not found[0] & found[1]
    return {str(ids) for ids in found[0]}, {str(ids) for ids in found[1]}, report


def rows_of(numbers: range) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {number}?", "completion": f"It is {number}."} for number in numbers]


def test_a_row_stays_on_its_side_whatever_is_around_it(demo_model: Path, tmp_path: Path) -> None:
    train, held_out, report = sides(demo_model, tmp_path / "a", rows_of(range(200)), 0.2)
    assert (report.rows, report.eval_rows, report.documents) == (200, len(held_out), len(train))
    assert 20 < len(held_out) < 60
    assert len(train) + len(held_out) == 200
    assert report.eval_documents == report.eval_rows
    more = [row | {"id": 1} for row in reversed(rows_of(range(100, 400)))]
    train_b, held_out_b, _ = sides(demo_model, tmp_path / "b", rows_of(range(100)) + more, 0.2)
    assert train <= train_b
    assert held_out <= held_out_b


def test_copies_of_a_row_are_on_one_side(demo_model: Path, tmp_path: Path) -> None:
    train, held_out, report = sides(demo_model, tmp_path / "a", rows_of(range(40)) * 3, 0.5)
    assert len(train) + len(held_out) == 40
    assert report.documents + report.eval_documents == 120


def test_an_empty_side_is_refused(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"eval_fraction 0.0001 leaves no row of rows.jsonl for evaluation"):
        sides(demo_model, tmp_path / "a", rows_of(range(5)), 0.0001)
    with pytest.raises(InvalidData, match=r"leaves no row of rows.jsonl for training"):
        sides(demo_model, tmp_path / "b", rows_of(range(5)), 0.999999)


@settings(max_examples=100)
@given(content=st.binary(), one=st.floats(0, 0.999), other=st.floats(0, 0.999))
def test_a_larger_fraction_holds_out_more(content: bytes, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert is_held_out(content, large) or not is_held_out(content, small)
    assert not is_held_out(content, 0.0)


def test_the_share_is_the_fraction() -> None:
    held_out = sum(is_held_out(str(number).encode(), 0.1) for number in range(20_000))
    assert 1800 < held_out < 2200


def test_the_same_row_in_another_spelling_has_the_same_content() -> None:
    chat = normalise({"messages": [{"content": "a", "role": "user", "weight": 1}]}, DatasetFormat.MESSAGES, {})
    same = normalise({"id": 3, "messages": [{"role": "user", "content": "a"}]}, DatasetFormat.MESSAGES, {})
    assert row_content(chat) == row_content(same)
    pair = normalise({"q": "a", "completion": "b"}, DatasetFormat.PROMPT_COMPLETION, {"prompt": "q"})
    assert row_content(pair) != row_content(chat)
