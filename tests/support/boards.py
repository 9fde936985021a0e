"""Every query of the shipped boards and rules: of panels, variables and annotations, as Grafana would send it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
NAMES = ("lab", "job", "node")


@dataclass(frozen=True, kw_only=True)
class Query:
    """One expression, and where it is: `lab / Loss A`. `legend` refers to labels of its series."""

    where: str
    kind: str
    expression: str
    legend: str = ""

    def filled(self, **values: str) -> str:
        """The expression with the board's variables filled in; those that are not given mean all."""
        text = self.expression
        # The longest names first: one may begin another.
        for name, value in sorted({**_ALL, **values}.items(), key=lambda pair: -len(pair[0])):
            text = text.replace(f"${name}", value)
        return text


# What Grafana would put for the windows at the scrape interval of the tests.
_ALL = {"instance": ".*", "project": ".*", "owner": ".*", "__rate_interval": "5s", "__range": "5m"}
_VARIABLE = re.compile(r"(?:label_values|query_result)\((.*?)(?:, \w+)?\)$")


@cache
def board(name: str) -> Any:
    """A board as it is committed."""
    return json.loads((DEPLOY / "dashboards" / f"{name}.json").read_text("utf-8"))


def rules(file: str) -> list[dict[str, Any]]:
    """The rules of a file in deploy/."""
    groups = yaml.safe_load((DEPLOY / file).read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[Query]:
    """All of them."""
    found: list[Query] = []
    for name in NAMES:
        shown = board(name)
        for panel in shown["panels"]:
            for target in panel.get("targets", []):
                where = f"{name} / {panel['title']} {target['refId']}"
                legend = target["legendFormat"]
                found.append(Query(where=where, kind="panel", expression=target["expr"], legend=legend))
        for variable in shown["templating"]["list"]:
            if variable["type"] == "query":
                matched = _VARIABLE.match(variable["query"])
                assert matched, variable
                found.append(Query(where=f"{name} / ${variable['name']}", kind="variable", expression=matched[1]))
        for mark in shown["annotations"]["list"]:
            legend = mark["titleFormat"] + mark["textFormat"]
            expression = mark["target"]["expr"]
            found.append(
                Query(where=f"{name} / mark {mark['name']}", kind="mark", expression=expression, legend=legend)
            )
    found += [Query(where=rule["record"], kind="rule", expression=rule["expr"]) for rule in rules("rules.yml")]
    return found
