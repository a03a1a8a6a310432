"""Tables and messages of the fab tasks. Decides nothing."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launch.backends.base import LaunchSpec
from launch.checkpoints import Listing
from launch.estimate import Outlook
from launch.plan import RunPlan
from launch.preflight import Finding
from launch.view import RunView, plain, run_facts

# Between two lines on how a run is, where nothing can be redrawn.
PLAIN_INTERVAL_S = 15.0


def print_json(value: Any) -> None:
    """Prints a value as JSON on standard output."""
    print(json.dumps(value, indent=1))


class Screen:
    """What a person sees of a run on nodes: the lines of its logs, and below them how it is now.

    On a terminal that is one table, redrawn in place; elsewhere a line each PLAIN_INTERVAL_S, and at each change of
    phase or nodes.
    """

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        self._quiet = quiet
        self._console = console or Console()
        self._live: Live | None = None
        self._said: tuple[float, object] = (-PLAIN_INTERVAL_S, None)

    def line(self, text: str) -> None:
        """Shows a line of a log as it is."""
        if not self._quiet:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def now(self, view: RunView) -> None:
        """Shows how the run is, in place of what was shown before."""
        if self._quiet:
            return None
        if not self._console.is_terminal:
            return self._say(view)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(view_table(view), refresh=True)
        return None

    def _say(self, view: RunView) -> None:
        state, now = (view.phase, view.attempt, [node.name for node in view.nodes]), time.monotonic()
        if state != self._said[1] or now - self._said[0] >= PLAIN_INTERVAL_S:
            self._said = (now, state)
            self.line(plain(view))

    def close(self) -> None:
        """Leaves the last view standing and draws no more."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def view_table(view: RunView) -> Group:
    """Returns how a run is: a line a node, and below it what is known of the whole."""
    table = Table(title=f"{view.name}: {view.phase}, attempt {view.attempt}", title_justify="left")
    for column in ("node", "ranks", "phase", "step", "heartbeat"):
        table.add_column(column)
    for node in view.nodes:
        age = "-" if node.heartbeat_age_s is None else f"{node.heartbeat_age_s:.0f} s ago"
        table.add_row(node.name, str(node.ranks or "-"), node.phase, str(node.step), age)
    for name, why in view.left.items():
        table.add_row(name, "-", f"left: {why}", "-", "-")
    return Group(table, Text(", ".join(run_facts(view))))


def print_findings(findings: Sequence[Finding]) -> None:
    """Prints what preflight found: one line a check and node, faults last, where they are seen."""
    order = {"ok": 0, "warn": 1, "fail": 2}
    table = Table(title="preflight", title_justify="left")
    for column in ("", "check", "node", "found", "next step"):
        table.add_column(column, overflow="fold")
    for finding in sorted(findings, key=lambda finding: order[finding.level]):
        table.add_row(finding.level, finding.check, finding.node, finding.message, finding.remedy)
    Console().print(table)


def print_error(error: Exception) -> None:
    """Prints an error and its next step on standard error."""
    print(f"error: {error}", file=sys.stderr)


def plan_table(plan: RunPlan, expected: Outlook | None = None) -> Table:
    """Returns the plan as a table of two columns, with what is expected of it."""
    table = Table(title="plan", show_header=False, title_justify="left")
    where = ", ".join(f"{node.name} x {node.ranks}" for node in plan.nodes)
    rows = {
        "nodes": f"{where} ({plan.device_name}, {plan.world_size} ranks)",
        "collectives": f"{plan.backend}, {plan.init_method}",
        "model": f"{plan.parameters:,} parameters, {plan.core_parameters:,} of them in the recurrent core",
        "precision": plan.precision + (", compiled" if plan.compile else ""),
        "ZeRO stage": str(plan.zero_stage),
        "batch": f"{plan.batch_size} sequences = micro-batch {plan.micro_batch} x accumulation {plan.accumulation} "
        f"x {plan.world_size} ranks; {plan.tokens_per_step:,} tokens a step",
        "steps": "known when the data is prepared" if plan.total_steps is None else f"{plan.total_steps:,}",
        "memory a rank": f"about {plan.memory.total_bytes / 2**30:.2f} of {plan.device_memory_bytes / 2**30:.1f} GiB",
        "checkpoints": plan.checkpoints,
        "work": f"{plan.flop_per_token / 1e6:,.1f} MFLOP a token"
        + ("" if plan.total_flop is None else f", {plan.total_flop:.3g} FLOP in all"),
    }
    for name, value in (rows | ({} if expected is None else _expected_rows(expected))).items():
        table.add_row(name, value)
    for note in plan.notes:
        table.add_row("note", note)
    return table


def _expected_rows(expected: Outlook) -> dict[str, str]:
    step, resume = expected.step_time, expected.resume
    time = "not known" if step.seconds is None else f"about {step.seconds:.3g} s"
    rows = {"step time": f"{time}: {step.source}"}
    if expected.run_s is not None:
        rows["run"] = f"about {_duration(expected.run_s)} of steps"
    if resume is not None:
        where = "" if resume.path is None else f"step {resume.step} ({resume.path}): "
        rows["resumes"] = "; passed over: ".join([where + resume.state, *resume.passed_over])
    return rows


def print_plan(plan: RunPlan, specs: Sequence[LaunchSpec] = (), expected: Outlook | None = None) -> None:
    """Prints the plan, and for a dry run the command and environment of each node."""
    console = Console()
    console.print(plan_table(plan, expected))
    for spec in specs:
        console.print(f"on {spec.node} in {spec.directory}:", highlight=False)
        for key, value in sorted(spec.env.items()):
            print(f"  {key}={shlex.quote(value)}")
        print(f"  {shlex.join(spec.argv)}")


def print_cost(cost: Mapping[str, Any]) -> None:
    """Prints the estimate of what an AWS stack costs, resource by resource."""
    currency = cost["currency"]
    table = Table(title=f"cost of {cost['cluster']} (estimate, {currency})", title_justify="left")
    for column in ("resource", "quantity", f"{currency}/h", "note"):
        table.add_column(column, overflow="fold")
    for line in cost["lines"]:
        table.add_row(line["resource"], f"{line['quantity']:g}", f"{line['usd_per_hour']:.4f}", line["note"])
    console = Console()
    console.print(table)
    console.print(
        f"{cost['usd_per_hour']:,.2f} {currency} an hour, {cost['usd_per_month']:,.2f} a month", highlight=False
    )


def print_status(rows: Sequence[dict[str, Any]]) -> None:
    """Prints one line a run."""
    table = Table()
    for column in ("run", "phase", "step", "loss", "tokens/s", "MFU", "started", "message"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            row["name"],
            row["phase"],
            f"{row['step']}/{row['total_steps'] or '?'}",
            "-" if row["loss"] is None else f"{row['loss']:.3f}",
            "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}",
            "unknown" if row["mfu_ratio"] is None else f"{row['mfu_ratio']:.1%}",
            f"{_duration(row['age_s'])} ago",
            row["message"],
        )
    Console().print(table)


def print_checkpoints(listing: Listing) -> None:
    """Prints one line a checkpoint, oldest first, and what could not be looked at."""
    table = Table(title=f"checkpoints of {listing.run}", title_justify="left")
    for column in ("step", "age", "size", "ranks", "ZeRO", "held-out loss", "state", "place"):
        table.add_column(column, overflow="fold")
    for row in listing.rows:
        table.add_row(
            f"{row.step}",
            "-" if row.age_s is None else _duration(row.age_s),
            "-" if row.size_bytes is None else f"{row.size_bytes / 2**20:,.1f} MiB",
            *("-" if value is None else str(value) for value in (row.world_size, row.zero_stage)),
            "-" if row.evaluation_loss is None else f"{row.evaluation_loss:.4f}",
            row.state,
            row.place,
        )
    console = Console()
    console.print(table)
    details = [f"step {row.step}: {row.detail}" for row in listing.rows if row.detail]
    for note in (*details, *listing.notes):
        console.print(note, highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
