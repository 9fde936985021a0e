"""A rank that does what its request says: {"1": "answer", "2": "fail", "3": "wait"}."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

from horizon_server.children.entry import Answer, Failure, Line, encode_line, end_with_parent
from horizon_server.errors import DoesNotFit


def main() -> None:
    """Take the arguments of `worker.rank`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("request", type=Path)
    for name in ("--rank", "--end-fd", "--shared-fd"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    end_with_parent()
    line: Line = Answer(None)
    match json.loads(arguments.request.read_text())[str(arguments.rank)]:
        case "fail":
            line = Failure(DoesNotFit(f"rank {arguments.rank} has no room"))
        case "wait":
            signal.pause()
    os.write(arguments.end_fd, encode_line(line))


if __name__ == "__main__":
    main()
