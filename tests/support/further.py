"""Values of a parameter with which only `make test-all` runs a test."""

from __future__ import annotations

import pytest
from _pytest.mark.structures import ParameterSet


def further(*values: object) -> list[ParameterSet]:
    """More cases of a claim that the values beside these show already; a tuple is one case of several parameters."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.further) for value in values
    ]
