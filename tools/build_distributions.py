"""Builds the two published distributions, horizon-train-client and horizon-train, from this checkout.

Owns which packages, commands and requirements each of them has (docs/adr/0017-two-wheels.md). Everything else is read
from pyproject.toml, so no version or requirement is written twice.

    python tools/build_distributions.py [--to dist] [client] [server]
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).resolve().parent.parent
BOTH = ("README.md", "LICENSE", "CHANGELOG.md")
"""Files that every source distribution has."""


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """What one distribution takes of the checkout."""

    name: str
    description: str
    requires_python: str
    packages: tuple[str, ...]
    """Folders of Python packages, as in the checkout."""
    scripts: tuple[str, ...]
    """The commands that it installs."""
    other_files: tuple[str, ...] = ()
    """What the build needs besides."""
    kernels: bool = False
    """Whether the wheel carries the compiled AdamW kernel, and is for one platform then."""


CLIENT = Distribution(
    name="horizon-train-client",
    description="The light client of horizon: submit and watch fine-tuning jobs on a shared machine.",
    requires_python=">=3.10",
    packages=("proto/horizon_proto", "proto/horizon_formats", "client/horizon_client"),
    scripts=("horizon",),
)
SERVER = Distribution(
    name="horizon-train",
    description="RAM-centric LLM fine-tuning: the daemon for the big-RAM GPU box, with its client.",
    requires_python=">=3.11",
    packages=("server/horizon_server",),
    scripts=("horizond",),
    other_files=("tools/build_kernels.py",),
    kernels=True,
)
DISTRIBUTIONS = {"client": CLIENT, "server": SERVER}


def requirements(project: dict[str, Any], distribution: Distribution) -> tuple[list[str], dict[str, list[str]]]:
    """Return the dependencies and the extras of a distribution, from the [project] table of the checkout.

    The extras of the client (hub, plot, trackers) are in both, because messages name them as those of the server's
    distribution. The server needs exactly its own version of the client. torch is an extra of it under two names,
    because it exists as a CPU and a CUDA build: `cpu` leaves the build to the index that pip is told, `cuda` adds the
    GPU's compiler.
    """
    listed = project["optional-dependencies"]
    extras = {name: list(needs) for name, needs in listed.items() if name not in ("server", "dev")}
    if distribution is CLIENT:
        return list(project["dependencies"]), extras
    server = listed["server"]
    torch = [one for one in server if _names(one, "torch")]
    triton = [one for one in listed["dev"] if _names(one, "triton")]
    assert len(torch) == len(triton) == 1, "pyproject.toml lists torch for the server and triton for tests, once each"
    others = [one for one in server if one not in torch]
    return [f"{CLIENT.name}=={project['version']}", *others], extras | {"cpu": torch, "cuda": torch + triton}


def _names(requirement: str, package: str) -> bool:
    name = re.match(r"[\w.-]+", requirement)
    return name is not None and name[0] == package


def project_file(checkout: dict[str, Any], distribution: Distribution) -> dict[str, Any]:
    """Return the pyproject.toml of a distribution: the checkout's, narrowed, and without anything computed later."""
    project = checkout["project"]
    dependencies, extras = requirements(project, distribution)
    kept = ("version", "readme", "license", "license-files", "keywords")
    oldest = int(distribution.requires_python.rpartition(".")[2])
    newest = max(int(found) for found in re.findall(r"Python :: 3\.(\d+)", "\n".join(project["classifiers"])))
    classifiers = [one for one in project["classifiers"] if not re.search(r"Python :: 3\.\d", one)]
    narrowed = {
        "name": distribution.name,
        "description": distribution.description,
        "requires-python": distribution.requires_python,
        "classifiers": classifiers
        + [f"Programming Language :: Python :: 3.{minor}" for minor in range(oldest, newest + 1)],
        "dependencies": dependencies,
        "optional-dependencies": extras,
        "scripts": {name: project["scripts"][name] for name in distribution.scripts},
    }
    wheel: dict[str, Any] = {"packages": list(distribution.packages)}
    if distribution.kernels:
        wheel["hooks"] = checkout["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    contents = [f"/{name}" for name in (*distribution.packages, *distribution.other_files, *BOTH)]
    return {
        "build-system": checkout["build-system"],
        "project": {name: project[name] for name in kept if name in project} | narrowed,
        "tool": {"hatch": {"build": {"targets": {"wheel": wheel, "sdist": {"include": contents}}}}},
    }


def stage(distribution: Distribution, folder: Path) -> None:
    """Fill `folder` with an ordinary project that any builder of Python packages can build."""
    checkout = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    ignored = shutil.ignore_patterns("__pycache__", "*.so", ".build-*")
    for name in distribution.packages:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in (*distribution.other_files, *BOTH):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project_file(checkout, distribution)), "utf-8")


def build(distribution: Distribution, to: Path, *, isolated: bool = True) -> list[Path]:
    """Build the source distribution, and from that the wheel; return both files.

    Without `isolated` the packages of this environment build them, and nothing is downloaded.
    """
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as built, tempfile.TemporaryDirectory() as folder:
        stage(distribution, Path(folder))
        command = [sys.executable, "-m", "build", "--outdir", built, folder]
        subprocess.run(command + ([] if isolated else ["--no-isolation"]), check=True, stdout=sys.stderr)
        return [Path(shutil.copy(file, to)) for file in sorted(Path(built).iterdir())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what the command line names, both by default, and print the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(DISTRIBUTIONS)}; both when none is named")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="folder for the files; dist by default")
    parser.add_argument("--no-isolation", action="store_true", help="build with the packages of this environment")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.names) - set(DISTRIBUTIONS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: give {' or '.join(DISTRIBUTIONS)}")
    for name in chosen.names or DISTRIBUTIONS:
        for file in build(DISTRIBUTIONS[name], chosen.to, isolated=not chosen.no_isolation):
            print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
