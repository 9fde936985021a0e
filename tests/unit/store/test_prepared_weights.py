"""The plane of weights: it is there where a target has one, whenever the first comes, and nothing else changes."""

from __future__ import annotations

import array
from pathlib import Path

import pytest

from horizon_formats.formats import DataKind
from horizon_server.errors import InvalidData
from horizon_server.store import prepared
from horizon_server.store.prepared import (
    EVALUATION_FOLDER,
    TOKENS_FILE,
    DocumentColumns,
    PreparedFolder,
    has_weights,
    open_prepared,
    planes_of,
)


def columns_of(*documents: list[float] | int) -> DocumentColumns:
    """One document for each argument: a list has the weights of its targets, a number is how many targets without
    weights it has."""
    columns = DocumentColumns()
    for given in documents:
        num_targets = given if isinstance(given, int) else len(given)
        columns.add(
            array.array("i", range(num_targets + 1)),
            b"\0" + b"\1" * num_targets,
            num_targets,
            weights=None if isinstance(given, int) else array.array("f", given),
        )
    return columns


def written(folder: Path, *batches: DocumentColumns, held_out: DocumentColumns | None = None) -> Path:
    with PreparedFolder(folder, with_evaluation=held_out is not None) as target:
        for batch in batches:
            target.train.add(batch)
        if target.evaluation is not None and held_out is not None:
            target.evaluation.add(held_out)
        target.publish({"kind": DataKind.TEXT})
    return folder


def test_targets_before_between_and_after_those_with_weights_have_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several blocks of what was written before the first weight.
    monkeypatch.setattr(prepared, "_ONES_AT_ONCE", 2)
    folder = written(
        tmp_path / "out", columns_of(3, 2), columns_of(1, [0.5, 2.0], 2, [3.0]), columns_of(2), columns_of([0.25], 1)
    )
    planes, _ = open_prepared(folder)
    assert planes["weights"].tolist() == [*[1] * 6, 0.5, 2, 1, 1, 3, 1, 1, 0.25, 1]
    assert not list(folder.glob("*.raw"))


def test_without_weights_there_is_no_plane_and_each_side_has_its_own(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", columns_of(3, 2), held_out=columns_of(1, [0.5]))
    assert set(open_prepared(folder)[0]) == set(planes_of(DataKind.TEXT))
    assert open_prepared(folder / EVALUATION_FOLDER)[0]["weights"].tolist() == [1, 0.5]
    assert (has_weights(folder), has_weights(folder / EVALUATION_FOLDER)) == (False, True)
    with pytest.raises(InvalidData, match="is not a prepared dataset"):
        has_weights(tmp_path)


def test_weights_of_another_type_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", columns_of([0.5]))
    whole = (folder / TOKENS_FILE).read_bytes()
    (folder / TOKENS_FILE).write_bytes(whole.replace(b'"weights":{"dtype":"F32"', b'"weights":{"dtype":"I32"', 1))
    with pytest.raises(InvalidData, match="weights is I32, expected F32; prepare the dataset again"):
        open_prepared(folder)
