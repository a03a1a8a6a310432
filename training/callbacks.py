"""What the training loop tells, and to whom: callbacks of rank 0, all off the hot path."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from training.phases import Span
from training.records import MetricsRecord, RunFolder

log = logging.getLogger("training")

BAR_MIN_WIDTH = 110


@dataclass(frozen=True)
class StepReport:
    """What the loop knows after a step."""

    step: int
    total_steps: int
    metrics: MetricsRecord | None = field(default=None)
    """Means since the last report with metrics; None between two log intervals."""
    step_s: float = 0.0
    """How long this step took."""
    spans: tuple[Span, ...] = ()
    """Its stretches by phase."""


class Callback(Protocol):
    """Told about the run; an exception in a callback ends the run, so callbacks are small."""

    def on_start(self, step: int, total_steps: int) -> None:
        """Called once, before the first step."""

    def on_step(self, report: StepReport) -> None:
        """Called after each optimizer step."""

    def on_message(self, text: str) -> None:
        """Called with a line that a person should see (evaluation, warning)."""

    def on_end(self) -> None:
        """Called once, however the run ends."""


class FolderLog:
    """Writes metrics.jsonl, state.json and logs/train.log."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def on_start(self, step: int, total_steps: int) -> None:
        self.run.update_state(phase="training", step=step, total_steps=total_steps)
        log.info("training from step %d to %d", step, total_steps)

    def on_step(self, report: StepReport) -> None:
        if report.metrics is not None:
            self.run.append(report.metrics)
            self.run.update_state(phase="training", step=report.step)
            log.info("step %d/%d  %s", report.step, report.total_steps, describe(report.metrics))

    def on_message(self, text: str) -> None:
        log.info("%s", text)

    def on_end(self) -> None:
        pass


class ConsoleProgress:
    """Progress on a terminal, or plain lines where there is none."""

    def __init__(self, console: Console, plain_interval_s: float = 10.0) -> None:
        self.console = console
        self._plain_interval_s = plain_interval_s
        self._last_plain = 0.0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def on_start(self, step: int, total_steps: int) -> None:
        self._last_plain = time.monotonic()
        if not self.console.is_terminal:
            return
        # The numbers come first: the bar is drawn only where there is room for it.
        bar = [BarColumn(bar_width=20)] if self.console.width >= BAR_MIN_WIDTH else []
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            *bar,
            TextColumn("{task.description}"),
            TextColumn("left"),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=8)),
            console=self.console,
            refresh_per_second=2,
        )
        self._bar.start()
        self._task = self._bar.add_task("first step", total=total_steps, completed=step)

    def on_step(self, report: StepReport) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=report.step)
            if report.metrics is not None:
                self._bar.update(self._task, description=describe(report.metrics))
        elif report.metrics is not None and time.monotonic() - self._last_plain >= self._plain_interval_s:
            self._last_plain = time.monotonic()
            left = (report.total_steps - report.step) * report.metrics.step_s
            line = f"step {report.step}/{report.total_steps}  {describe(report.metrics)}  left {left:.0f} s"
            self.console.print(line, highlight=False, soft_wrap=True)

    def on_message(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def on_end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def describe(metrics: MetricsRecord) -> str:
    """Returns the numbers of a record as a person reads them."""
    loss = "not finite" if metrics.loss is None else f"{metrics.loss:.3f}"
    mfu = "unknown" if metrics.mfu_ratio is None else f"{metrics.mfu_ratio:.1%}"
    return f"loss {loss}  {metrics.tokens_per_s:,.0f} tokens/s  MFU {mfu}  r {metrics.recurrence:.1f}"
