"""Signs of life: written in place, readable at any moment, and on a full disk too."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.heartbeat import HEARTBEATS_VARIABLE, SIZE_BYTES, Pulse, read_heartbeats
from training.preemption import StopFlag
from training.records import RunFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HEARTBEATS_VARIABLE, str(tmp_path / "beats"))
    return tmp_path / "beats"


def test_heartbeat_carries_phase_step_reason_to_leave_and_code(folder: Path, tmp_path: Path) -> None:
    flag = StopFlag()
    pulse = Pulse(RunFolder(tmp_path), 3, flag)
    (beat,) = read_heartbeats(folder)
    assert (beat.rank, beat.phase, beat.leaving, beat.code) == (3, "starting", "", None)
    flag.request_leave("drained: " + "long \u00e9" * 500)
    pulse.beat("training", 7)
    (beat,) = read_heartbeats(folder)
    assert (beat.phase, beat.step) == ("training", 7)
    assert beat.leaving.startswith("drained: long")
    pulse.ended(75)
    (beat,) = read_heartbeats(folder)
    assert (beat.phase, beat.code) == ("ended", 75)


def test_heartbeat_is_written_over_itself(folder: Path, tmp_path: Path) -> None:
    """No new file and no more bytes: that is what a full disk still allows."""
    pulse = Pulse(RunFolder(tmp_path), 0)
    before = (folder / "rank-0.json").stat()
    for step in (1, 100_000):
        pulse.beat("training", step)
    after = (folder / "rank-0.json").stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, SIZE_BYTES)
    assert [path.name for path in folder.iterdir()] == ["rank-0.json"]


def test_a_heartbeat_that_cannot_be_written_ends_nothing(folder: Path, tmp_path: Path) -> None:
    folder.write_text("no folder")
    Pulse(RunFolder(tmp_path), 0).beat("training", 1)
    assert read_heartbeats(folder) == []


def test_torn_heartbeat_is_left_out(folder: Path, tmp_path: Path) -> None:
    Pulse(RunFolder(tmp_path), 0)
    (folder / "rank-1.json").write_text('{"rank": 1, "pi')
    assert [beat.rank for beat in read_heartbeats(folder)] == [0]
