"""Generates deploy/dashboards/horizon.json. `--check` only says whether the committed file is what this would write."""

from __future__ import annotations

import json
import sys

from dashboard_charts import ROWS, Chart, select
from generated_files import ROOT, write_or_check
from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model

TARGET = ROOT / "deploy" / "dashboards" / "horizon.json"
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""The variable of that name, so that the board works with any data source of a Grafana that is there already."""


def render() -> str:
    """Return the dashboard as the JSON that Grafana provisions."""
    builder = (
        board.Dashboard("horizon")
        .uid("horizon")
        .description("A horizon daemon: jobs, memory, transfers and calls.")
        .tags(["horizon"])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(board.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_query_variable("instance", "Node", "label_values(horizon_build_info, instance)"))
        .with_variable(_query_variable("name", "Job", f"label_values({select('horizon_job_info')}, name)"))
    )
    next_id = 1
    for title, charts in ROWS:
        builder.with_row(board.Row(title).id(next_id))
        next_id += 1
        for chart in charts:
            builder.with_panel(_panel(chart).id(next_id))
            next_id += 1
    return json.dumps(builder.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _query_variable(name: str, label: str, query: str) -> board.QueryVariable:
    return (
        board.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(chart: Chart) -> timeseries.Panel | stat.Panel:
    panel = _number() if chart.kind == "number" else _lines(stacked=chart.kind == "stacked")
    panel.title(chart.title).description(chart.text).unit(chart.unit).datasource(SOURCE)
    panel.span(chart.width).height(chart.height)
    if chart.minimum is not None:
        panel.min(chart.minimum)
    if chart.maximum is not None:
        panel.max(chart.maximum)
    for number, (expression, legend) in enumerate(chart.queries):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number))
        panel.with_target(query.range().datasource(SOURCE))
    return panel


def _number() -> stat.Panel:
    newest = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().graph_mode(common_model.BigValueGraphMode.AREA).reduce_options(newest).no_value("-")


def _lines(*, stacked: bool) -> timeseries.Panel:
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
    return panel


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__ or "", lambda: {TARGET: render()}, make_target="dashboards"))
