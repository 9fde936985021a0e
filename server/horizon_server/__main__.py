"""The entry of `horizond`: says what to install when a part of it is missing, then hands over to the command line."""

from __future__ import annotations

import importlib.util
import os
import sys

# Not all that the server needs, but enough to notice what is missing.
_NEEDED = (
    *("alembic", "aiosqlite", "cryptography", "fastapi"),
    *("pydantic_settings", "sqlalchemy", "structlog", "torch", "transformers"),
)


def main() -> int:
    """Run horizond and return its exit code."""
    # A checkout's base install, which is the client, has this command too, and the published one has no torch.
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"horizond needs more than is installed: {', '.join(missing)} cannot be found; "
            "install 'horizon-train[cuda]' ('horizon-train[cpu]' without a GPU), "
            "or from a checkout: pip install -c constraints.txt '.[server]'\n"
        )
        return 2
    # Not before: without the extra these imports end in a traceback.
    from horizon_server.imports import seldom_collecting

    with seldom_collecting():
        from horizon_server.cli import run
        from horizon_server.state_dir import PRIVATE_UMASK

    os.umask(PRIVATE_UMASK)
    return run()


if __name__ == "__main__":
    sys.exit(main())
