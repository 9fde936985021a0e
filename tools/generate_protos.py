"""Generate the Python code of the wire contract, or check that the committed code is fresh.

Uses the oldest supported grpcio-tools in a virtual environment of its own (`.venv-protos`): generated code runs on the
protobuf it was generated with and on newer ones, never on older ones, so the oldest generator gives the widest range.

    python tools/generate_protos.py            # write
    python tools/generate_protos.py --check    # exit 1 when the committed code is stale
"""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
TOOLS = ROOT / ".venv-protos"
REQUIREMENTS = ("grpcio-tools==1.70.0", "mypy-protobuf==3.6.0", "protobuf==5.29.6", "setuptools==80.9.0")


def ensure_tools() -> Path:
    """Make the generator's environment on first use and return its python."""
    python = TOOLS / "bin" / "python"
    stamp = TOOLS / "requirements.txt"
    wanted = "\n".join(REQUIREMENTS)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(TOOLS, with_pip=True, clear=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS], check=True)
    stamp.write_text(wanted)
    return python


def generate(target: Path) -> None:
    """Write all generated modules of every proto file below `target`."""
    python = ensure_tools()
    protos = sorted(str(p.relative_to(PROTO)) for p in PROTO.glob("horizon_proto/**/*.proto"))
    command = [
        str(python),
        "-m",
        "grpc_tools.protoc",
        f"-I{PROTO}",
        f"--plugin=protoc-gen-mypy={TOOLS}/bin/protoc-gen-mypy",
        f"--plugin=protoc-gen-mypy_grpc={TOOLS}/bin/protoc-gen-mypy_grpc",
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--mypy_grpc_out=quiet:{target}",
        *protos,
    ]
    subprocess.run(command, check=True)


def stale_files(fresh: Path) -> list[str]:
    """Names of generated files that differ between `fresh` and the committed tree, either way."""
    made = {str(p.relative_to(fresh)) for p in fresh.rglob("*_pb2*.py*")}
    kept = {str(p.relative_to(PROTO)) for p in PROTO.rglob("*_pb2*.py*") if "__pycache__" not in p.parts}
    changed = {n for n in made & kept if not filecmp.cmp(fresh / n, PROTO / n, shallow=False)}
    return sorted(changed | (made ^ kept))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="only compare with the committed code")
    if not parser.parse_args().check:
        generate(PROTO)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = stale_files(Path(folder))
    for name in stale:
        print(f"stale: proto/{name}; run `make protos`")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
