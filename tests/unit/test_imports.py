"""How often Python looks for garbage while libraries are imported."""

from __future__ import annotations

import gc

import pytest

from horizon_server.imports import seldom_collecting


def test_python_collects_seldom_in_the_block_and_as_before_after_it() -> None:
    usual = gc.get_threshold()
    with seldom_collecting():
        within = gc.get_threshold()
        with seldom_collecting():
            assert gc.get_threshold() == within
        assert gc.get_threshold() == within, "an inner block ends nothing of an outer one"
    assert within[0] > 10 * usual[0]
    assert gc.isenabled() and gc.get_threshold() == usual


def test_an_import_that_fails_leaves_the_collector_as_it_was() -> None:
    usual = gc.get_threshold()
    with pytest.raises(ImportError), seldom_collecting():
        raise ImportError("no such library")
    assert gc.get_threshold() == usual
