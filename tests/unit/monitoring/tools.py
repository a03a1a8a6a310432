"""What the tests of the monitoring room share."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import yaml

from training.records import MetricsRecord

CHECKOUT = Path(__file__).resolve().parents[3]
MONITORING = CHECKOUT / "monitoring"


def rule_files() -> list[Path]:
    return sorted((MONITORING / "rules").glob("*.yml"))


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def known_series() -> dict[str, str]:
    """Returns name -> type of all series of monitoring/series.yaml."""
    groups = yaml.safe_load((MONITORING / "series.yaml").read_text())
    return {name: entry[0] for group in groups.values() for name, entry in group.items()}


def metrics_record(step: int, *, at: float | None = None, step_s: float = 0.1, **changes: object) -> MetricsRecord:
    """Returns what a run notes of a step; `changes` are fields of their own value."""
    values = {
        "time": time.time() if at is None else at,
        "step": step,
        "tokens": step * 10,
        "loss": 2.0,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "recurrence": 4.0,
        "step_s": step_s,
        "data_wait_s": 0.1 * step_s,
        "forward_s": 0.3 * step_s,
        "backward_s": 0.4 * step_s,
        "optimizer_s": 0.1 * step_s,
        "tokens_per_s": 100.0,
        "flop_per_s": 1e9,
        "mfu_ratio": 0.4,
        "state_change_ratio": 0.1,
        "token_correlation": 0.3,
        **changes,
    }
    return MetricsRecord.model_validate(values)
