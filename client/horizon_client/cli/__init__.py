"""The `horizon` command. `main` is the entry point; a command is imported when it is used, the client when it
connects."""

from __future__ import annotations

import os


def main() -> None:
    """Run the command line and exit with its code."""
    # grpc reads it when it is imported, and without it logs every failed handshake between our own messages
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from horizon_client.cli.root import horizon

    horizon.main(prog_name="horizon")
