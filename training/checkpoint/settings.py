"""From the configuration to the parts of this room, for the node side and the control side alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from training.checkpoint.policy import Interval, best_interval_s, mean_time_between_failures_s
from training.checkpoint.remote import MIB, S3Settings, S3Store

if TYPE_CHECKING:
    from training.config.schema import CheckpointSection

# Until the first save has been measured.
ASSUMED_STALL_S = 1.0


def open_store(section: CheckpointSection, run_name: str) -> S3Store | None:
    """Returns the object store of a run (its checkpoints lie under PREFIX/RUN/), or None where none is configured."""
    if section.remote is None:
        return None
    url = f"{section.remote.rstrip('/')}/{run_name}"
    part_bytes = section.upload_part_mib * MIB
    return S3Store(S3Settings(url, section.endpoint_url, section.upload_concurrency, part_bytes))


def interval(
    section: CheckpointSection, ranks: int, stall_s: float = ASSUMED_STALL_S, write_s: float = 0.0
) -> Interval:
    """Returns when to save.

    `auto` follows from what a save costs (`stall_s`) and how long it goes on beside (`write_s`).
    """
    if section.interval_minutes is not None:
        return Interval(seconds=section.interval_minutes * 60.0)
    if section.interval_steps == "auto":
        mtbf_s = mean_time_between_failures_s(ranks, section.gpu_hours_between_failures)
        return Interval(seconds=best_interval_s(stall_s, mtbf_s, write_s))
    return Interval(steps=section.interval_steps)


def describe_interval(section: CheckpointSection, ranks: int) -> str:
    """Returns the interval as the plan shows it."""
    chosen = interval(section, ranks)
    if section.interval_steps == "auto" and section.interval_minutes is None:
        hours = mean_time_between_failures_s(ranks, section.gpu_hours_between_failures) / 3600
        return (
            f"about every {(chosen.seconds or 0) / 60:,.0f} min at first: sqrt(2 x {ASSUMED_STALL_S:g} s a save x "
            f"{hours:,.0f} h between failures), then by the measured cost of a save"
        )
    if chosen.seconds is not None:
        return f"every {chosen.seconds / 60:g} min"
    return "at the end only" if chosen.steps is None else f"every {chosen.steps:,} steps"


def checkpoints_folder(run: Path) -> Path:
    """Where the checkpoints of a run folder lie."""
    return run / "checkpoints"
