"""The drain mark, and how it reaches the flag and the heartbeat of a rank."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from training.drain import DRAIN_MARK, drain_mark, drain_reason
from training.preemption import DrainWatcher, StopFlag


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"reason": "kernel upgrade", "by": "ansible"}', "kernel upgrade"),
        ("disk is replaced\nby hand\n", "disk is replaced by hand"),
        ("", "no reason is given"),
        ("{}", "no reason is given"),
        ('"text"', "text"),
        ("{broken", "{broken"),
        ("x" * 1000, "x" * 200),
    ],
)
def test_reason_is_read_from_json_or_text(tmp_path: Path, text: str, reason: str) -> None:
    mark = tmp_path / "drained"
    assert drain_reason(mark) is None
    mark.write_text(text)
    assert drain_reason(mark) == reason


def test_a_mark_that_cannot_be_read_counts(tmp_path: Path) -> None:
    (tmp_path / "drained").mkdir()
    assert "cannot be read" in str(drain_reason(tmp_path / "drained"))
    assert drain_reason(Path("/dev/null/drained")) is None


def test_place_of_the_mark() -> None:
    assert str(drain_mark({})) == DRAIN_MARK
    assert drain_mark({"LOOPWORKS_DRAIN_MARK": "/x"}) == Path("/x")


def test_a_mark_that_appears_makes_the_rank_leave(tmp_path: Path) -> None:
    flag, mark = StopFlag(), tmp_path / "drained"
    watcher = DrainWatcher(flag, mark, interval_s=0.01)
    time.sleep(0.05)
    assert not flag.stop
    mark.write_text("upgrade")
    deadline = time.monotonic() + 5
    while not flag.stop and time.monotonic() < deadline:
        time.sleep(0.01)
    watcher.close()
    assert (flag.stop, flag.reason, flag.leaving) == (True, "drained: upgrade", "drained: upgrade")


def test_a_request_to_stop_that_came_first_stays_the_reason() -> None:
    flag = StopFlag()
    flag.request_stop("signal SIGTERM")
    flag.request_leave("drained: x")
    assert (flag.reason, flag.leaving) == ("signal SIGTERM", "drained: x")
