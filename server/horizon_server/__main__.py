"""The entry of `horizond`: says what to install when the server extra is missing, then hands over to the command
line."""

from __future__ import annotations

import importlib.util
import os
import sys

# Not the whole server extra, but enough of it to notice that it is missing.
_NEEDED = (
    *("alembic", "aiosqlite", "cryptography", "fastapi"),
    *("pydantic_settings", "sqlalchemy", "structlog", "torch", "transformers"),
)


def main() -> int:
    """Run horizond and return its exit code."""
    # The base install, which is the client, has this command too.
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"horizond needs the server extra, and {', '.join(missing)} cannot be found; "
            "install it from a checkout: pip install -c constraints.txt '.[server]'\n"
        )
        return 2
    # Not before: without the extra these imports end in a traceback.
    from horizon_server.cli import run
    from horizon_server.state_dir import PRIVATE_UMASK

    os.umask(PRIVATE_UMASK)
    return run()


if __name__ == "__main__":
    sys.exit(main())
