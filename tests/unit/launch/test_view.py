"""How a run on nodes is shown: redrawn on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch.present import Screen
from launch.supervision import NodeState, Watch
from launch.view import RunView, last_metrics, plain, run_view
from tests.unit.launch.test_runs import record
from training.records import RunFolder, RunState

STATE = RunState(name="r", phase="training", step=3, total_steps=10)


def node(name: str, *ranks: tuple[str, int, float]) -> NodeState:
    beats: list[dict[str, Any]] = [
        {"rank": 0, "phase": phase, "step": step, "time": time} for phase, step, time in ranks
    ]
    return NodeState(node=name, attempt=1, phase="running", time=1.0, ranks=beats)


def view(**changes: Any) -> RunView:
    watch = Watch(pid=1, start=1.0, attempt=1, phase="running", active=["a", "b"], **changes)
    nodes = {"a": node("a", ("training", 4, 99.0), ("starting", 0, 95.0))}
    metrics = record(4).model_copy(update={"loss": 2.5, "tokens_per_s": 1234.0})
    return run_view(STATE, metrics, watch, nodes, 90.0, now=100.0)


def test_a_node_is_as_far_as_its_slowest_rank() -> None:
    first, second = view().nodes
    assert (first.phase, first.step, first.heartbeat_age_s, first.ranks) == ("starting", 0, 5.0, 2)
    assert (second.phase, second.heartbeat_age_s) == ("starting", None)


def test_plain_line() -> None:
    text = plain(view(restarts=1, left={"c": "drained: x"}))
    assert text == (
        "r training | step 4/10 | loss 2.500 | 1,234 tokens/s | MFU unknown | checkpoint 10 s ago | 1 restart(s)"
        " | a starting step 0 5 s ago | b starting step 0 | c left: drained: x"
    )
    early = run_view(STATE, None, Watch(pid=1, start=1.0, phase="preparing"), {}, None, now=0.0)
    assert plain(early) == "r preparing | step 3/10 | MFU unknown | no checkpoint yet"


def screen(terminal: bool) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(console=Console(file=out, force_terminal=terminal, width=100)), out


def test_a_terminal_shows_a_table_that_is_redrawn_below_the_log() -> None:
    shown, out = screen(terminal=True)
    shown.now(view())
    shown.line("a line of the log")
    shown.now(view(restarts=2))
    shown.close()
    text = out.getvalue()
    assert "\x1b[1A" in text, "the cursor goes up to draw over what was there"
    assert "5 s ago" in text
    assert "a line of the log" in text
    last = text[text.rindex("attempt 1") :]
    assert "2 restart(s)" in last
    assert "1,234 tokens/s" in last


def test_elsewhere_a_line_comes_at_changes_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, out = screen(terminal=False)
    for _ in range(5):
        shown.now(view())
    assert out.getvalue().count("\n") == 1
    shown.now(run_view(STATE, None, Watch(pid=1, start=1.0, phase="preparing", attempt=2), {}, None, now=0.0))
    assert out.getvalue().count("\n") == 2
    monkeypatch.setattr("launch.present.PLAIN_INTERVAL_S", 0.0)
    shown.now(run_view(STATE, None, Watch(pid=1, start=1.0, phase="preparing", attempt=2), {}, None, now=0.0))
    assert out.getvalue().count("\n") == 3
    assert "\x1b" not in out.getvalue()
    Screen(quiet=True, console=Console(file=out)).now(view())
    assert out.getvalue().count("\n") == 3


def test_last_metrics_of_a_long_file(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert last_metrics(run) is None
    for step in range(300):
        run.append(record(step))
    with run.metrics.open("a") as file:
        file.write('{"step": 300, "unfini')
    found = last_metrics(run)
    assert found is not None
    assert found.step == 299
