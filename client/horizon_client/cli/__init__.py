"""The `horizon` command. `main` is the entry point; commands load when they are named, the library when one speaks to a server."""

from __future__ import annotations


def main() -> None:
    """Run the command line and leave with its exit code."""
    from horizon_client.cli.root import horizon

    horizon.main(prog_name="horizon")
