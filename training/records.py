"""The run folder: what a run leaves on disk, and the shape of each record in it.

    runs/NAME/
      config.resolved.yaml   the whole configuration, every default written out
      plan.json              what was decided before the start (launch/plan.py)
      state.json             RunState: where the run is, its process, how it ended
      metrics.jsonl          MetricsRecord, one line per log interval
      events.jsonl           EventRecord: starts, evaluations, skipped steps, saves, errors
      result.json            the closing table
      logs/train.log         what rank 0 says; logs/rank-N.log: everything rank N and its libraries print
      errors/rank-N.json     RankError of a rank that failed
      checkpoints/step-N/    all that a restart needs (training/checkpoint/)
      models/step-N/         weights, configuration and tokenizer, at the end of the run

This is the contract between the node side (which writes it) and the control side (which reads it). Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Phase = Literal["starting", "training", "evaluating", "saving", "finished", "failed", "stopped"]


class Record(BaseModel):
    """Base of the records; a reader ignores fields that a newer writer has added."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class MetricsRecord(Record):
    """One line of metrics.jsonl: means over the steps since the line before."""

    time: float = Field(description="Unix time of the record, seconds.")
    step: int = Field(description="Optimizer steps done.")
    tokens: int = Field(description="Tokens seen by all ranks since the run began.")
    loss: float | None = Field(description="Mean cross entropy in nats per token; null when it was not finite.")
    grad_norm: float | None = Field(description="Global gradient norm before clipping; null when it was not finite.")
    learning_rate: float
    recurrence: float = Field(description="Mean core iterations r.")
    step_s: float = Field(description="Mean seconds of a step.")
    data_wait_s: float = Field(description="Mean seconds of a step spent waiting for data.")
    tokens_per_s: float
    flop_per_s: float = Field(description="Model FLOP a second over all ranks, counting the iterations that ran.")
    mfu_ratio: float | None = Field(
        description="flop_per_s over the peak of the devices; null when the peak is unknown."
    )
    state_change_ratio: float | None = Field(None, description="|s_r - s_(r-1)| / |s_r| after the recurrence.")
    forward_s: float | None = Field(None, description="Mean seconds of a step in forward passes.")
    backward_s: float | None = Field(None, description="Mean seconds of a step in backward passes.")
    optimizer_s: float | None = Field(None, description="Mean seconds of a step in the optimizer.")
    token_correlation: float | None = Field(None, description="Mean correlation of centred token states after it.")


class EventRecord(Record):
    """One line of events.jsonl."""

    time: float
    kind: str = Field(
        description="For example start, resume, checkpoint, evaluation, nonfinite, rollback, health, stopped, end."
    )
    step: int
    message: str
    details: dict[str, Any] = Field(default_factory=dict)


class RunState(Record):
    """state.json: replaced as a whole at each change."""

    name: str
    phase: Phase
    step: int = 0
    total_steps: int = 0
    launcher_pid: int | None = Field(None, description="Process group of torchrun on the node that started the run.")
    launcher_start: float | None = Field(None, description="Start time of that process (guards against reused ids).")
    started: float = 0.0
    updated: float = 0.0
    message: str = ""


class RankError(Record):
    """errors/rank-N.json: why a rank ended."""

    rank: int
    time: float
    cause: str
    remedy: str = ""
    exit_code: int
    kind: str = Field("error", description="out_of_memory lets the launcher try again with half the micro-batch.")
    expected: bool = Field(description="True when it is a fault that the user can mend, False for a defect.")


class RunFolder:
    """Paths of a run folder, and the only code that writes its records."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.name = self.path.name
        self.config = self.path / "config.resolved.yaml"
        self.plan = self.path / "plan.json"
        self.state = self.path / "state.json"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.result = self.path / "result.json"
        self.logs = self.path / "logs"
        self.log = self.logs / "train.log"
        self.errors = self.path / "errors"
        self.checkpoints = self.path / "checkpoints"
        self.models = self.path / "models"

    def rank_log(self, rank: int) -> Path:
        """Returns the file that holds what rank `rank` and its libraries print."""
        return self.logs / f"rank-{rank}.log"

    def append(self, record: MetricsRecord | EventRecord) -> None:
        """Adds one line to metrics.jsonl or events.jsonl."""
        path = self.metrics if isinstance(record, MetricsRecord) else self.events
        with path.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")

    def clear_errors(self) -> None:
        """Removes the errors of an attempt that was answered by another one."""
        for path in self.errors.glob("rank-*.json"):
            path.unlink(missing_ok=True)

    def event(self, kind: str, step: int, message: str, **details: Any) -> None:
        """Adds an event with the present time."""
        self.append(EventRecord(time=time.time(), kind=kind, step=step, message=message, details=details))

    def write_state(self, state: RunState) -> None:
        """Replaces state.json as a whole: a reader sees the old one or the new one."""
        _replace(self.state, state.model_copy(update={"updated": time.time()}).model_dump_json(indent=1))

    def update_state(self, **changes: Any) -> None:
        """Replaces the given fields of state.json."""
        self.write_state(self.read_state().model_copy(update=changes))

    def read_state(self) -> RunState:
        """Returns state.json; a folder without one is a run that never started."""
        try:
            return RunState.model_validate_json(self.state.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return RunState(name=self.name, phase="starting")

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Writes plan.json."""
        _replace(self.plan, json.dumps(plan, indent=1))

    def write_result(self, result: dict[str, Any]) -> None:
        """Writes result.json."""
        _replace(self.result, json.dumps(result, indent=1))

    def write_error(self, error: RankError) -> None:
        """Writes errors/rank-N.json."""
        self.errors.mkdir(exist_ok=True)
        _replace(self.errors / f"rank-{error.rank}.json", error.model_dump_json(indent=1))

    def read_errors(self) -> list[RankError]:
        """Returns the errors of all ranks, the earliest first: later ones are often only its echo."""
        found = []
        for path in self.errors.glob("rank-*.json"):
            with contextlib.suppress(FileNotFoundError):  # cleared at this moment, since a new attempt begins
                found.append(RankError.model_validate_json(path.read_text(encoding="utf-8")))
        return sorted(found, key=lambda error: (error.time, error.rank))

    def read_metrics(self) -> list[MetricsRecord]:
        """Returns all complete lines of metrics.jsonl."""
        return [MetricsRecord.model_validate_json(line) for line in _complete_lines(self.metrics)]

    def read_events(self) -> list[EventRecord]:
        """Returns all complete lines of events.jsonl."""
        return [EventRecord.model_validate_json(line) for line in _complete_lines(self.events)]


def _complete_lines(path: Path) -> Iterator[str]:
    """Yields the lines that end with a newline: the last one may still be in the writing."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            yield from (line for line in file if line.endswith("\n") and line.strip())


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)
