"""The version of the installed distribution."""

from importlib.metadata import version as _distribution_version

VERSION: str = _distribution_version("horizon-train")
