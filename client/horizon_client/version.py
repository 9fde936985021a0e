"""The version of the installed client."""

from __future__ import annotations

DISTRIBUTIONS = ("horizon-train-client", "horizon-train")
"""What brings the client: its own distribution, or that of a checkout, which has client and server in one."""


def client_version() -> str:
    """Return the version of the distribution that this client was installed with."""
    # Not at the top: reading what is installed is slow, and few commands need it.
    from importlib.metadata import PackageNotFoundError, version

    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    # As the server says it of a bare source tree, where nothing is installed.
    return "0+source"
