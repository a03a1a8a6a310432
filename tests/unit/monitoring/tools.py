"""What the tests of the monitoring room share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

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
