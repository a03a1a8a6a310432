"""Fixtures: a run that is training."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from training.records import RunFolder, RunState


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.path.mkdir(parents=True)
    folder.write_state(RunState(name="a", phase="training", started=time.time() - 100))
    return folder
