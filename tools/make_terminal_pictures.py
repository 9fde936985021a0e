"""Make the pictures of a terminal that the docs show, docs/pictures/terminal-*.svg: what real commands print against a
real daemon with scripted workers.

python -m tools.make_terminal_pictures [FOLDER]
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text
from tests.support.page_world import fill, page_world

from horizon_server.demo.recipe import write_demo_model

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
MAX_BYTES = 60_000
COLUMNS, LINES = 132, 40
_LIMIT_S = 120.0
_NODE = "gpu-node"
PICTURES = {
    "home": (),
    "queue": ("queue",),
    "top": ("top", "--once"),
    "compare": ("job", "compare", "gsm8k-lr2e5", "gsm8k-lr1e5"),
    "plot": ("job", "plot", "gsm8k-lr2e5", "gsm8k-lr1e5"),
}
"""By name, the arguments of `horizon`."""

# As rich writes it, without the fonts that it would fetch from elsewhere.
_FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def printed(arguments: tuple[str, ...], environment: Mapping[str, str]) -> str:
    """Run a command in a terminal of its own; return what it has printed there, with its colours."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "horizon_client", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=its, stderr=its, env=dict(environment))
    os.close(its)
    pieces = []
    try:
        while piece := _piece(ours):
            pieces.append(piece)
        assert process.wait(_LIMIT_S) == 0, b"".join(pieces)
    finally:
        process.kill()
        os.close(ours)
    return b"".join(pieces).decode().replace("\r\n", "\n")


def _piece(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # as Linux says that nobody has the other end any more
        return b""


def picture(arguments: tuple[str, ...], text: str, name: str) -> str:
    """Return a picture of a terminal in which a command has printed the text."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bold green"), (" ".join(("horizon", *arguments)), "bold")))
    for line in text.splitlines():
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    svg = console.export_svg(title="", theme=SVG_EXPORT_THEME, code_format=_FORMAT, unique_id=f"terminal-{name}")
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", ""), "a picture fetches nothing"
    return svg


def main(arguments: list[str]) -> None:
    """Run a daemon, fill it and run every command."""
    folder = Path(arguments[0]) if arguments else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        model = write_demo_model(Path(work) / "model")
        with page_world(Path(work) / "state", model, max_resident_jobs=1) as world:
            fill(world)
            environment = {
                "PATH": os.environ["PATH"],
                "PYTHONPATH": os.pathsep.join(sys.path),
                "HOME": work,
                "TERM": "xterm-256color",
                "COLORTERM": "truecolor",
                "LANG": "C.UTF-8",
                "HORIZON_SERVER": world.daemon.endpoints["grpc"],
                "HORIZON_TOKEN": world.tokens["ann"],
            }
            for name, command in PICTURES.items():
                text = printed(command, environment).replace(world.daemon.endpoints["grpc"], f"{_NODE}:7433")
                text = re.sub(rf"\b{re.escape(os.uname().nodename)}\b", _NODE, text)
                svg = picture(command, text, name)
                assert work not in svg, "nothing of this machine is in a picture"
                path = folder / f"terminal-{name}.svg"
                path.write_text(svg, "utf-8")
                assert path.stat().st_size < MAX_BYTES, f"{path} has {path.stat().st_size} bytes"
                print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
