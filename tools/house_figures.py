"""Print figures of the house: how long, how finely cut, how often repeated. They serve the reader; no build fails on them.

python tools/house_figures.py [ROOT]     # ROOT: another checkout, to compare
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

GENERATED = re.compile(r"^(#|\"\"\") ?Generated ", re.IGNORECASE | re.MULTILINE)
# Files that stand in for a part of the daemon. Tests of its interfaces build the real one (tests/daemon_parts.py), which is not a fake.
FAKE_DAEMONS = ("tests/scripted_worker.py", "tests/support/line.py")
# A file that spells most of these lists the figures of a step by hand.
STEP_FIGURES = {
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "tokens_per_second",
    "duration_s",
    "compute_s",
    "optimizer_s",
    "optimizer_exposed_s",
    "overlap_ratio",
    "model_flops",
    "host_memory_bytes",
    "device_memory_bytes",
}
A_CALL = re.compile(r"\bPauseJob\b|\bdef pause\b|\.pause\(|\bpause_job\b")


def sources(root: Path, *folders: str) -> Iterator[Path]:
    """Yield the hand-written Python files below these folders."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            if "_pb2" not in path.name and not GENERATED.search(path.read_text("utf-8")[:400]):
                yield path


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def num_lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its `def` to its end, without its docstring."""
    last = node.end_lineno or node.lineno
    first = node.body[0]
    is_doc = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return last - node.lineno + 1 - ((first.end_lineno or 0) - first.lineno + 1 if is_doc else 0)


def is_protocol(node: ast.AST) -> bool:
    """Whether a class is a typing.Protocol itself."""
    return isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)


def comments_in(text: str) -> int:
    """Number of comments that are not directives to a tool."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|fmt:|!)", t.string) for t in tokens)


def figures(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield what is measured, its value, and the value to reach."""
    paths = list(sources(root, "server", "client", "proto/horizon_formats"))
    texts = [path.read_text("utf-8") for path in paths]
    trees = [ast.parse(text) for text in texts]
    lines = sum(text.count("\n") for text in texts)
    yield "hand-written lines, server + client", f"{lines:,}", "<= 27,500"
    yield "files", str(len(paths)), "<= 190"
    yield "longest file, lines", str(max(text.count("\n") for text in texts)), "<= 500"
    protocols = [node for tree in trees for node in ast.walk(tree) if is_protocol(node)]
    protocol_lines = sum((p.end_lineno or 0) - p.lineno + 1 for p in protocols if isinstance(p, ast.ClassDef))
    yield "Protocol classes / lines", f"{len(protocols)} / {protocol_lines}", "<= 14 / 330"
    docs = [ast.get_docstring(node) or "" for tree in trees for node in functions(tree)]
    yield "docstrings that only say 'See X'", str(sum(bool(re.fullmatch(r"See .*", doc)) for doc in docs)), "0"
    lengths = sorted(num_lines_of(node) for tree in trees for node in functions(tree))
    ninety_nine = lengths[int(len(lengths) * 0.99)]
    yield (
        "function length, median / 99 % / max",
        f"{statistics.median(lengths):g} / {ninety_nine} / {lengths[-1]}",
        "8 to 12 / 40",
    )
    comments = sum(map(comments_in, texts))
    yield "comments per 100 lines", f"{100 * comments / lines:.1f}", ">= 3"
    listing = [
        path for path, text in zip(paths, texts, strict=True) if len(STEP_FIGURES & set(re.findall(r"\w+", text))) >= 9
    ]
    yield "files that list a step's figures", str(len(listing)), "1 and the proto"
    touched = [path for path, text in zip(paths, texts, strict=True) if A_CALL.search(text)]
    yield "files that one job call (pause) touches", str(len(touched)), "<= 6"
    fakes = sum((root / name).read_text("utf-8").count("\n") for name in FAKE_DAEMONS if (root / name).exists())
    yield "lines of fake daemons in tests", str(fakes), "<= 400"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent, help="a checkout")
    root = parser.parse_args().root
    print("| what | now | to reach |\n| --- | --- | --- |")
    for what, now, wanted in figures(root):
        print(f"| {what} | {now} | {wanted} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
