"""The child that checks a model folder: its path in, its architecture and size or what is wrong with it out.

Configs and headers are other people's bytes: what makes their parsers take time or memory ends this process and no other.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from horizon_server.children.entry import EventWriter, serve
from horizon_server.models.folder_checks import check_folder


def work(request: Any, _: EventWriter) -> dict[str, Any]:
    """Check the folder. Raises: as `check_folder`."""
    return dataclasses.asdict(check_folder(Path(request["folder"])))


if __name__ == "__main__":
    sys.exit(serve(work, who="the model check"))
