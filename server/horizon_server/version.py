"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _distribution_version


def _version() -> str:
    try:
        return _distribution_version("horizon-train")
    except PackageNotFoundError:
        # The engine also runs from a bare source tree, where nothing is installed.
        return "0+source"


VERSION: str = _version()
