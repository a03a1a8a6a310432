"""What a plan can say of the future: how long a step will take, and from which checkpoint the run would go on.

Both look and change nothing. A step's time is measured where a former run of the same plan has left one, computed from
an assumption that is stated where the peak of the device is known, and otherwise not known.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.plan import RunPlan
from launch.runs import list_runs
from training.checkpoint import catalog, layout
from training.checkpoint.settings import checkpoints_folder, open_store
from training.checkpoint.verify import describe, verify
from training.config import RunConfig
from training.errors import LoopworksError
from training.records import RunFolder

# Dense models reach 0.4 to 0.6 of the peak on one or a few nodes, the published recurrent-depth model (arXiv
# 2502.05171) about 0.26 of useful work on 4096 devices.
ASSUMED_MFU = 0.35
MOST_RUNS = 50
# Of a plan: what makes a step take as long as another one.
SAME = (
    *("device", "device_name", "precision", "zero_stage", "batch_size", "micro_batch", "sequence_length"),
    *("parameters", "flop_per_token", "compile"),
)
# Reading more than that only to plan would take longer than anybody waits; the start itself reads everything.
DEEP_BYTES = 2 * 2**30


@dataclass(frozen=True)
class StepTime:
    """Expected seconds of an optimizer step; None when they are not known. `source` says where they come from."""

    seconds: float | None
    source: str


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run would go on from (`path` None: none, it starts anew), and newer ones passed over."""

    path: str | None
    step: int
    state: str
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outlook:
    """What `fab plan` says beyond the plan; `resume` is None for a new run."""

    step_time: StepTime
    run_s: float | None
    resume: ResumePoint | None

    def as_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)


def outlook(config: RunConfig, plan: RunPlan, folder: RunFolder | None) -> Outlook:
    """Returns what is to be expected of a plan; `folder` is that of a run that goes on."""
    step = step_time(plan, list_runs(config.run.dir)[:MOST_RUNS])
    resume = None if folder is None else resume_point(folder, config)
    left = None if plan.total_steps is None else max(0, plan.total_steps - (resume.step if resume else 0))
    return Outlook(step, None if step.seconds is None or left is None else step.seconds * left, resume)


def step_time(plan: RunPlan, runs: Iterable[RunFolder]) -> StepTime:
    """Returns what a step is expected to take: as in the newest former run that was planned alike, else by FLOP."""
    here = as_compared(plan.as_json())
    for run in runs:
        before = _plan_of(run)
        if before is not None and as_compared(before) == here and (seconds := measured_step_s(run)) is not None:
            return StepTime(seconds, f"median of run {run.name}, which was planned alike")
    if plan.peak_flop_per_s is None:
        cause = "the peak of this processor is not known" if plan.device == "cpu" else "the GPU's peak is not known"
        return StepTime(None, f"{cause}, and no former run was planned alike")
    flop = plan.flop_per_token * plan.tokens_per_step
    peak = plan.peak_flop_per_s / plan.world_size / 1e12
    source = f"{flop:.3g} FLOP at an ASSUMED MFU of {ASSUMED_MFU:.0%} of {plan.world_size} x {peak:,.0f} TFLOP/s"
    return StepTime(flop / (ASSUMED_MFU * plan.peak_flop_per_s), source)


def as_compared(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a plan that a step's time depends on; nodes count, their names do not."""
    ranks = sorted(node["ranks"] for node in plan.get("nodes", []))
    return {name: plan.get(name) for name in SAME} | {"ranks": ranks}


def measured_step_s(run: RunFolder) -> float | None:
    """Returns the median seconds of a step in the later half of a run; None when it has hardly begun."""
    records = run.read_metrics()
    later = [record.step_s for record in records[len(records) // 2 :]]
    return statistics.median(later) if len(records) > 1 else None


def resume_point(run: RunFolder, config: RunConfig) -> ResumePoint:
    """Returns the newest checkpoint of the run folder that verifies; what only an object store has is noted."""
    root = checkpoints_folder(run.path)
    passed = []
    for entry in reversed(catalog.scan(root)):
        folder = root / layout.step_name(entry.step)
        size = 0 if entry.manifest is None else entry.manifest.size_bytes
        deep = size <= DEEP_BYTES
        if faults := verify(folder, deep=deep):
            passed.append(f"{folder.name}: {describe(faults)}")
            continue
        state = "verified" if deep else f"names and sizes are right; its {size / 2**30:.0f} GiB are read at the start"
        return ResumePoint(str(folder), entry.step, state, (*passed, *_remote_notes(run, config, entry.step)))
    return ResumePoint(None, 0, "no checkpoint here: it would start anew", (*passed, *_remote_notes(run, config, -1)))


def _remote_notes(run: RunFolder, config: RunConfig, step: int) -> list[str]:
    try:
        store = open_store(config.checkpoint, run.name)
        newer = [] if store is None else [found for found in store.steps() if found > step]
    except LoopworksError as error:
        return [f"object store: {error.cause}"]
    return [f"step {max(newer)} is in the object store and would be fetched first"] if newer else []


def _plan_of(run: RunFolder) -> dict[str, Any] | None:
    try:
        found = json.loads(Path(run.plan).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
