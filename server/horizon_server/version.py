"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("horizon-train")
except PackageNotFoundError:
    # The engine also runs from a bare source tree, where nothing is installed.
    VERSION = "0+source"
