"""The trackers that there are, and the Python package that each needs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

TRACKERS: Mapping[str, str] = {
    "tensorboard": "tensorboardX",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "trackio": "trackio",
}
"""Module to import by the name of the tracker, which is also the name of the extra that installs it."""


def is_installed(tracker: str) -> bool:
    """Return whether the tracker's package is here; it is looked for and not loaded."""
    return find_spec(TRACKERS[tracker]) is not None


def package_problem(tracker: str) -> str:
    """Return what to do where the package is missing, as the end of a message that names the tracker."""
    return f"needs a package that is not installed: pip install 'horizon-train[{tracker}]'"
