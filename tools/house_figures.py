"""Print figures of the house beside what they should reach: its size, how far a decision is relayed, how lines are
bent. No build fails on them. Where one works against clarity, clarity goes first.

python tools/house_figures.py [ROOT]     # ROOT: another checkout, to compare
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

GENERATED = re.compile(r"^(#|\"\"\") ?Generated ", re.IGNORECASE | re.MULTILINE)
MAX_COLUMNS = 120
MAX_COLUMNS_OF_DOCS = 160
# The names of what is decided once for a run: micro-batch, placement of layer inputs, residents, kept products.
KNOBS = ("micro_batch_tokens", "activation_placement", "resident_layers", "product_layers")
# A class or function that declares so many of these itself describes how a job runs.
RUN_DECISION = {
    *KNOBS,
    "device_kind",
    "device",
    "compute_dtype",
    "grad_bytes",
    "grad_dtype_bytes",
    "num_threads",
    "residency",
}
NUM_OF_A_RUN_DECISION = 4
A_CALL = re.compile(r"\bPauseJob\b|\bdef pause\b|\.pause\(|\bpause_job\b")
# Their sizes are many, and each is one of the computation's own.
KERNELS = ("engine/attention/", "engine/fused/", "engine/cross_entropy", "store/kernels", "_triton.py")


@dataclass(frozen=True)
class Source:
    """One file written by hand."""

    root: Path
    path: Path

    @cached_property
    def text(self) -> str:
        """What is in it."""
        return self.path.read_text("utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def name(self) -> str:
        """Its path in the checkout."""
        return self.path.relative_to(self.root).as_posix()

    @property
    def num_lines(self) -> int:
        """How many lines it has."""
        return self.text.count("\n")

    @property
    def is_kernel(self) -> bool:
        """Whether it computes, with arguments that are all sizes and pointers."""
        return any(part in self.name for part in KERNELS)


def sources(root: Path, *folders: str) -> list[Source]:
    """Return the hand-written Python files below these folders."""
    return [
        Source(root, path)
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
        if "_pb2" not in path.name and not GENERATED.search(path.read_text("utf-8")[:400])
    ]


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names that a caller passes."""
    of = node.args
    return [a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs) if a.arg not in ("self", "cls")]


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method."""
    return (node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def classes(source: Source) -> Iterator[ast.ClassDef]:
    """Yield every class."""
    return (node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef))


def fields(node: ast.ClassDef) -> list[str]:
    """Return the fields that a record declares: names with a type in its body."""
    return [
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.unparse(statement.annotation)
    ]


def is_record(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass or a pydantic model with fields of its own."""
    return any("dataclass" in ast.unparse(d) for d in node.decorator_list) or any(
        ast.unparse(base).endswith(("Model", "Section", "BaseSettings")) for base in node.bases
    )


def is_protocol(node: ast.ClassDef) -> bool:
    """Whether a class is a typing.Protocol itself; `BoundedProtocol` speaks a network protocol."""
    return any(re.fullmatch(r"(typing\.)?Protocol(\[.*\])?", ast.unparse(base)) for base in node.bases)


def num_relayed(call: ast.Call) -> int:
    """How many arguments a call hands on under the name that they have: `seed=seed`, `seed=config.seed`,
    `seed=self._seed`."""
    names = [
        (k.arg, k.value.id if isinstance(k.value, ast.Name) else getattr(k.value, "attr", "")) for k in call.keywords
    ]
    return sum(name == value.lstrip("_") for name, value in names if name)


def import_circles(of: list[Source], package: str) -> list[set[str]]:
    """Return the groups of modules that import each other. Late imports count; those for types, and those by a name in
    a text, do not."""
    names = {
        source.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".").partition(".")[2]: source
        for source in of
    }
    modules = {name: source for name, source in names.items() if name.startswith(package)}
    imports = {name: _imports(source, name, modules) for name, source in modules.items()}

    def reached_from(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(imports[start])
        while todo:
            if (name := todo.pop()) not in seen:
                seen.add(name)
                todo += imports[name]
        return seen

    reached = {name: reached_from(name) for name in modules}
    circles = {frozenset(o for o in reached[name] if name in reached[o]) for name in modules if name in reached[name]}
    return [set(circle) for circle in circles]


def _imports(source: Source, name: str, modules: dict[str, Source]) -> set[str]:
    for_types = {
        id(inner)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # Of a package its modules are imported, or names of the package itself.
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= parts & modules.keys() or {node.module}
    return (found & modules.keys()) - {name}


def figures(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield what is counted, its value, and the value to reach."""
    ours = sources(root, "server", "client", "proto/horizon_formats")
    server = [source for source in ours if source.name.startswith("server/")]
    plain = [source for source in ours if not source.is_kernel]
    lines = [line for source in ours for line in source.text.splitlines()]
    yield "lines by hand / files", f"{len(lines):,} / {len(ours)}", "<= 53,000 / 305"
    decisions = [
        node.name
        for source in server
        for node in (*classes(source), *functions(source))
        if len(RUN_DECISION & set(fields(node) if isinstance(node, ast.ClassDef) else parameters(node)))
        >= NUM_OF_A_RUN_DECISION
    ]
    yield "definitions of the run decision", str(len(decisions)), "1"
    spelled = {knob: sum(bool(re.search(rf"\b{knob}\b", source.text)) for source in server) for knob in KNOBS}
    yield f"files that spell {', '.join(KNOBS)}", " / ".join(map(str, spelled.values())), "<= 4 each"
    calls = [node for source in plain for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    relays = [count for call in calls if (count := num_relayed(call)) >= 6]
    yield "calls relaying 6 or more arguments / arguments", f"{len(relays)} / {sum(relays)}", "<= 8 / 55"
    wide = [node for source in plain for node in functions(source) if len(parameters(node)) >= 9]
    yield "functions with 9 or more parameters, kernels apart", str(len(wide)), "<= 5"
    large = [node for source in ours for node in classes(source) if is_record(node) and len(fields(node)) >= 14]
    yield "records of 14 fields or more", str(len(large)), "<= 14"
    skips = sum(source.text.count("# fmt: skip") for source in ours if "triton" not in source.path.name)
    yield "`# fmt: skip` outside Triton", str(skips), "0"
    yield f"lines over {MAX_COLUMNS} columns", f"{sum(len(line) > MAX_COLUMNS for line in lines):,}", "0"
    short = [source for source in ours if source.path.name != "__init__.py" and source.num_lines < 40]
    yield "files under 40 lines", str(len(short)), "<= 25"
    stems = Counter(source.path.stem for source in ours if not source.path.stem.startswith("__"))
    yield "module names used twice or more", str(sum(count > 1 for count in stems.values())), "<= 15"
    ignored, untyped = (sum(s.text.count(word) for s in server) for word in ("type: ignore", "dict[str, Any]"))
    yield "`type: ignore` / `dict[str, Any]` in server", f"{ignored} / {untyped}", "<= 40 / 50"
    yield "Protocols", str(sum(is_protocol(node) for source in ours for node in classes(source))), "<= 5"
    yield "files that one job call (pause) touches", str(sum(bool(A_CALL.search(s.text)) for s in ours)), "<= 6"
    circles = [*import_circles(server, "horizon_server"), *import_circles(ours, "horizon_client")]
    yield "import circles", str(len(circles)), "0"
    docs = [line for path in (root / "docs").rglob("*.md") for line in path.read_text("utf-8").splitlines()]
    yield f"docs lines over {MAX_COLUMNS_OF_DOCS} columns", str(sum(len(x) > MAX_COLUMNS_OF_DOCS for x in docs)), "0"
    yield "test lines", f"{sum(source.num_lines for source in sources(root, 'tests')):,}", "<= 52,000"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent, help="a checkout")
    root = parser.parse_args().root
    print("| what | now | reach |\n| --- | --- | --- |")
    for what, now, wanted in figures(root):
        print(f"| {what} | {now} | {wanted} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
