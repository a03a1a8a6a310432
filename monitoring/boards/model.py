"""What a board is: rows of panels, each with its unit and its expressions. Knows nothing of Grafana."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel; `bounds` are (value, colour) steps, the first from minus infinity."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["line", "stack", "number"] = "line"
    about: str = ""
    bounds: tuple[tuple[float | None, str], ...] = ()
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True)
class Board:
    """A dashboard; `variables` are (name, series, label) whose values the reader chooses from."""

    uid: str
    title: str
    about: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    variables: tuple[tuple[str, str, str], ...] = field(default=())


GOAL_90 = ((None, "red"), (80.0, "orange"), (90.0, "green"))
"""GPU utilisation: the goal is 90 %."""


def line(title: str, unit: str, expr: str, legend: str, about: str = "", **more: float) -> Panel:
    """Returns a panel of one expression."""
    return Panel(title, unit, (Query(expr, legend),), about=about, **more)  # type: ignore[arg-type]


def number(
    title: str, unit: str, expr: str, bounds: tuple[tuple[float | None, str], ...] = (), about: str = ""
) -> Panel:
    """Returns a panel that shows the last value."""
    return Panel(title, unit, (Query(expr, ""),), kind="number", bounds=bounds, about=about)
