"""Boards in Grafana's JSON, by its foundation SDK."""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models

from monitoring.boards.model import Board, Panel

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="loopworks-prometheus")
# Of 24 columns.
NUMBER_WIDTH, LINE_WIDTH, NUMBER_HEIGHT, LINE_HEIGHT = 4, 12, 4, 8


def to_json(board: Board) -> str:
    """Returns the dashboard as the text that is committed."""
    content = json.loads(JSONEncoder().encode(_builder(board).build()))
    for number, panel in enumerate(content["panels"], start=1):
        panel["id"] = number
        # The SDK writes null where nothing is set; a panel without the key takes Grafana's defaults.
        if panel.get("options", 0) is None:
            del panel["options"]
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _builder(board: Board) -> dashboard.Dashboard:
    result = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags(["loopworks"])
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .editable()
    )
    for name, series, label in board.variables:
        result = result.with_variable(
            dashboard.QueryVariable(name)
            .datasource(DATASOURCE)
            .query(f"label_values({series}, {label})")
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".*")
            .current(models.VariableOption(text="All", value="$__all"))
            .multi(True)
        )
    for title, panels in board.rows:
        result = result.with_row(dashboard.Row(title))
        for panel in panels:
            result = result.with_panel(_panel(panel))
    return result


def _panel(panel: Panel) -> Any:
    builder: Any
    if panel.kind == "number":
        builder = stat.Panel().span(NUMBER_WIDTH).height(NUMBER_HEIGHT)
    else:
        builder = timeseries.Panel().span(LINE_WIDTH).height(LINE_HEIGHT).line_width(1)
        builder = builder.show_points(common.VisibilityMode.AUTO)
    if panel.kind == "stack":
        stacking = common.StackingConfig(mode=common.StackingMode.NORMAL, group="A")
        builder = builder.fill_opacity(70).stacking(_Built(stacking))
    builder = builder.title(panel.title).unit(panel.unit).datasource(DATASOURCE).description(panel.about)
    if panel.minimum is not None:
        builder = builder.min(panel.minimum)
    if panel.maximum is not None:
        builder = builder.max(panel.maximum)
    if panel.bounds:
        steps = [models.Threshold(value=value, color=colour) for value, colour in panel.bounds]
        builder = builder.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + index))
        builder = builder.with_target(target.range())
    return builder


class _Built:
    """A finished object where the SDK wants a builder."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def build(self) -> Any:
        """Returns it."""
        return self._value
