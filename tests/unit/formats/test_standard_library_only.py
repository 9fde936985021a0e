"""The shared rules need no installed package: the client that imports them stays light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import horizon_formats

FOLDER = Path(horizon_formats.__file__).parent


def test_every_module_loads_without_installed_packages() -> None:
    names = [f"horizon_formats.{path.stem}" for path in sorted(FOLDER.glob("*.py")) if path.stem != "__init__"]
    assert len(names) > 5
    program = f"import sys; sys.path.append({str(FOLDER.parent)!r}); import {', '.join(names)}"
    # -I and -S: neither the environment nor site-packages are looked at.
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, timeout=240)
