"""A registry as Prometheus reads it, in text format 0.0.4.

`prometheus_client.generate_latest` writes the same, and the tests compare the two. It validates and escapes every label
of every series in every scrape, which takes most of its time; here the text of a series' name and labels is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# More than the series of any node; those of ended jobs are pushed out.
_KEPT_SERIES = 16384


def exposition(registry: CollectorRegistry, shows: Callable[[Mapping[str, str]], bool]) -> bytes:
    """Return the text of those series whose labels `shows` is true for; a family without series still has its help."""
    lines: list[str] = []
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        about = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {about}\n# TYPE {name} {family.type}\n")
        lines += [
            f"{_series(sample.name, tuple(sample.labels.items()))} {_number(sample.value)}\n"
            for sample in family.samples
            if shows(sample.labels)
        ]
    return "".join(lines).encode()


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=_KEPT_SERIES)
def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return name
    escaped = [
        (key, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")) for key, value in sorted(labels)
    ]
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}"
