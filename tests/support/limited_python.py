"""An environment whose Python processes may take little memory, for children that the daemon gives no limit of their
own.

A limit set from outside comes too late: the process may have allocated all that it wants by then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Read by every Python process as it starts, before the module that it runs.
_SITECUSTOMIZE = "import resource\nresource.setrlimit(resource.RLIMIT_DATA, ({limit}, {limit}))\n"


def limited(folder: Path, environment: Mapping[str, str], *, memory_bytes: int) -> dict[str, str]:
    """Return `environment` with the limit; `folder` is made for it."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(limit=memory_bytes), "ascii")
    return {**environment, "PYTHONPATH": os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")])}
