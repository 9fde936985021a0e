"""Generates deploy/dashboards/*.json. `--check` only says whether the committed files are what this would write."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from boards.chart import JOB_BOARD, JOB_PAGE, Board, Chart, Mark, Variable
from boards.job import JOB_OF_LAB
from boards.lab import LAB
from boards.node import NODE
from generated_files import ROOT, write_or_check
from grafana_foundation_sdk.builders import bargauge, common, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FOLDER = ROOT / "deploy" / "dashboards"
BOARDS = {"lab": LAB, "job": JOB_OF_LAB, "node": NODE}
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""The variable of that name, so that a board works with any data source of a Grafana that is there already."""


def render(shown: Board) -> str:
    """Return the dashboard as the JSON that Grafana provisions."""
    builder = (
        board.Dashboard(shown.title)
        .uid(shown.uid)
        .description(shown.text)
        .tags(["horizon"])
        .timezone("browser")
        .time(shown.since, "now")
        .refresh("30s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(board.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(board.DashboardLink("Boards").type(model.DashboardLinkType.DASHBOARDS).tags(["horizon"]).keep_time(True))
    )
    for title, address in shown.links.items():
        link = board.DashboardLink(title).type(model.DashboardLinkType.LINK).url(address).target_blank(True)
        builder.link(link.icon("external link"))
    for variable in shown.variables:
        builder.with_variable(_variable(variable))
    next_id = 1
    for title, charts in shown.rows:
        builder.with_row(board.Row(title).id(next_id))
        next_id += 1
        for chart in charts:
            builder.with_panel(_panel(chart).id(next_id))
            next_id += 1
    plain = json.loads(json.dumps(builder.build(), cls=JSONEncoder))
    # The SDK does not know the fields by which a Prometheus query becomes an annotation.
    plain["annotations"] = {"list": [_annotation(mark) for mark in shown.marks]}
    return json.dumps(plain, indent=2, sort_keys=True) + "\n"


def _variable(variable: Variable) -> board.QueryVariable:
    builder = (
        board.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(SOURCE)
        .query(variable.query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )
    if variable.pattern:
        builder.regex(variable.pattern)
    if variable.hidden:
        builder.hide(model.VariableHide.HIDE_VARIABLE)
    if variable.several:
        every = model.VariableOption(selected=True, text="All", value="$__all")
        builder.multi(True).include_all(True).all_value(".*").current(every)
    return builder


def _annotation(mark: Mark) -> dict[str, Any]:
    return {
        "name": mark.name,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "enable": True,
        "iconColor": mark.color,
        "target": {"expr": mark.query, "refId": "Anno", "interval": "15s"},
        "titleFormat": mark.title,
        "textFormat": mark.text,
        "useValueForTime": mark.is_time,
    }


def _panel(chart: Chart) -> Any:
    kinds: dict[str, Callable[[], Any]] = {
        "number": _number,
        "bars": _bars,
        "table": lambda: _table(chart),
        "lines": lambda: _lines(stacked=False, marked=chart.warn is not None or chart.bad is not None),
        "stacked": lambda: _lines(stacked=True, marked=False),
    }
    panel = kinds[chart.kind]()
    panel.title(chart.title).description(f"{chart.text}\n\nGood: {chart.good}").unit(chart.unit).datasource(SOURCE)
    panel.span(chart.width).height(chart.height)
    if chart.minimum is not None and chart.kind != "table":
        panel.min(chart.minimum)
    if chart.maximum is not None:
        panel.max(chart.maximum)
    if chart.kind != "table":
        panel.thresholds(_thresholds(chart))
    if chart.of_jobs:
        panel.data_links([_link(title, address) for title, address in _JOB_LINKS.items()])
    for number, (expression, legend) in enumerate(chart.queries):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number))
        if chart.kind == "table":
            query.instant().format(PromQueryFormat.TABLE)
        elif chart.kind == "bars":
            query.instant()
        else:
            query.range()
        panel.with_target(query.datasource(SOURCE))
    return panel


_JOB_LINKS = {
    "Web page of this job": JOB_PAGE + "${__field.labels.job_id}",
    "Board of this job": JOB_BOARD + "${__field.labels.job_id}",
}


def _link(title: str, address: str) -> board.DashboardLink:
    return board.DashboardLink(title).url(address).target_blank(True)


def _thresholds(chart: Chart) -> board.ThresholdsConfig:
    """Colours by value: green where it is good."""
    warn, bad = chart.warn, chart.bad
    if warn is not None and bad is not None and bad < warn:
        steps = [(None, "red"), (bad, "orange"), (warn, "green")]
    else:
        steps = [(None, "green"), *((value, color) for value, color in ((warn, "orange"), (bad, "red")) if value)]
    found = [model.Threshold(value=value, color=color) for value, color in steps]
    return board.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(found)


def _newest() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def _number() -> stat.Panel:
    return stat.Panel().graph_mode(common_model.BigValueGraphMode.AREA).reduce_options(_newest()).no_value("-")


def _bars() -> bargauge.Panel:
    panel = bargauge.Panel().orientation(common_model.VizOrientation.HORIZONTAL).no_value("-")
    return panel.display_mode(common_model.BarGaugeDisplayMode.BASIC).reduce_options(_newest())


def _lines(*, stacked: bool, marked: bool) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).placement(common_model.LegendPlacement.BOTTOM)
    panel = (
        timeseries.Panel()
        .legend(legend.display_mode(common_model.LegendDisplayMode.LIST))
        .tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI))
        .line_width(1.5)
        .fill_opacity(30 if stacked else 8)
        .show_points(common_model.VisibilityMode.NEVER)
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL))
    if marked:
        dashed = common.GraphThresholdsStyleConfig().mode(common_model.GraphTresholdsStyleMode.DASHED)
        panel.thresholds_style(dashed)
    return panel


def _table(chart: Chart) -> table.Panel:
    """One row a series: labels that the queries share join their values."""
    # Grafana calls the values of several queries "Value #A", and those of one query "Value".
    single = len(chart.queries) == 1
    fields = {
        (("Value" if single else f"Value #{one.of}") if len(one.of) == 1 else one.of): one for one in chart.columns
    }
    order = {name: number for number, name in enumerate(fields)}
    panel = table.Panel().with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(
        model.DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": list(fields)}})
    )
    # Titles by override: the links of a row refer to fields by their names.
    panel.with_transformation(model.DataTransformerConfig(id_val="organize", options={"indexByName": order}))
    for name, column in fields.items():
        properties: dict[str, Any] = {
            "displayName": column.title,
            "unit": column.unit,
            **({"links": [_plain_link(*link) for link in column.links.items()]} if column.links else {}),
        }
        panel.override_by_name(name, [model.DynamicConfigValue(id_val=k, value=v) for k, v in properties.items()])
    return panel


def _plain_link(title: str, address: str) -> dict[str, Any]:
    return {"title": title, "url": address, "targetBlank": True}


if __name__ == "__main__":
    files = {FOLDER / f"{name}.json": shown for name, shown in BOARDS.items()}
    sys.exit(
        write_or_check(
            __doc__ or "", lambda: {path: render(shown) for path, shown in files.items()}, make_target="dashboards"
        )
    )
