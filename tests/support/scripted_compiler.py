"""A compiler that compiles nothing: a child of the daemon that waits until a test lets it go on, and then says that the
library has what was asked for.

What it does is in the files of a folder beside the library: `released` lets it end, `fails` makes it fail; each start
leaves a file `started-PID`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from horizon_server.children.entry import EventWriter, serve
from horizon_server.codec import from_plain
from horizon_server.errors import WorkerFailed
from horizon_server.events import Message
from horizon_server.jobs.compile_request import CompileRequest, MadeBook

MODULE = "tests.support.scripted_compiler"


def folder_of(library: Path) -> Path:
    """Where a test and its compilers leave each other files."""
    folder = library.parent / "scripted-compiler"
    folder.mkdir(exist_ok=True)
    return folder


def work(request: Any, events: EventWriter) -> list[str]:
    """Wait, then say that all is there."""
    wanted = from_plain(CompileRequest, request)
    folder = folder_of(Path(wanted.library))
    (folder / f"started-{os.getpid()}").touch()
    if (folder / "fails").exists():
        raise WorkerFailed("it cannot")
    events.send(Message(level="info", text="compiling layers: kind 1 of 1"))
    while not (folder / "released").exists():
        time.sleep(0.005)
    MadeBook(Path(wanted.library)).add(wanted.identity(), [], device=wanted.device, seconds=50.0)
    return []


if __name__ == "__main__":
    sys.exit(serve(work, who="the compilation"))
