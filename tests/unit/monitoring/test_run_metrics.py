"""What Prometheus is told of the runs by their folders and processes."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.monitor_files import Layout, Ports
from launch.run_metrics import control_page, run_samples, withdraw_dead_targets
from tests.unit.monitoring.tools import known_series
from training.metrics import target_file
from training.records import Phase, RunFolder, RunState


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "runs", tmp_path / "state", Ports(1, 2, 3, 4, 5))


def make_run(layout: Layout, name: str, phase: Phase, *, alive: bool = False, updated_ago_s: float = 0) -> RunFolder:
    run = RunFolder(layout.runs_dir / name)
    run.path.mkdir(parents=True)
    run.config.write_text("monitoring:\n  log_interval_steps: 10\n  cluster: east\n")
    own = psutil.Process()
    state = RunState(name=name, phase=phase, started=time.time() - updated_ago_s, updated=time.time() - updated_ago_s)
    if alive:
        state = state.model_copy(update={"launcher_pid": own.pid, "launcher_start": own.create_time()})
    run.state.write_text(state.model_dump_json())
    return run


def test_runs_are_told_with_their_cluster(layout: Layout) -> None:
    make_run(layout, "lives", "training", alive=True)
    make_run(layout, "broke", "failed")
    make_run(layout, "old", "failed", updated_ago_s=90_000)
    make_run(layout, "vanished", "training")
    make_run_on_nodes(layout, "far", {"gpu1": 2, "gpu2": 40})
    text = control_page(layout.runs_dirs).decode()
    assert 'loopworks_run_phase{cluster="east",run="lives",phase="training"} 1' in text
    assert 'loopworks_run_phase{cluster="east",run="lives",phase="failed"} 0' in text
    assert 'loopworks_run_phase{cluster="east",run="broke",phase="failed"} 1' in text
    assert 'loopworks_run_phase{cluster="east",run="vanished",phase="failed"} 1' in text
    assert 'run="old"' not in text
    assert "loopworks_runs_disk_free_bytes" in text
    names = {line.split("{")[0].split()[0] for line in text.splitlines() if not line.startswith("#")}
    assert names == {name for name in known_series() if name.startswith("loopworks_run")}


def make_run_on_nodes(layout: Layout, name: str, ages_s: dict[str, float]) -> RunFolder:
    """A run on nodes whose supervisor is not on this machine; each node last reported so long ago."""
    run = make_run(layout, name, "training")
    settings: dict[str, Any] = {"nodes": [{"name": node} for node in ages_s], "facts": {node: {} for node in ages_s}}
    settings |= {"min_nodes": 1, "most_nodes": 2, "restarts": 3, "hang_s": 60, "code": "~/code"}
    (run.path / "nodes.json").write_text(json.dumps(settings))
    (run.path / "supervision.json").write_text(json.dumps({"pid": 999_999_999, "start": 1.0, "attempt": 2}))
    (run.path / "nodes").mkdir()
    for rank, (node, age_s) in enumerate(ages_s.items()):
        at = time.time() - age_s
        beats = [{"rank": rank, "pid": 1, "phase": "training", "step": 7, "time": at - 1}]
        beats += [{"rank": rank + 8, "pid": 2, "phase": "ended", "step": 7, "time": at - 500}]
        state = {"node": node, "attempt": 2, "phase": "running", "time": at, "ranks": beats}
        file = run.path / "nodes" / f"{node}.json"
        file.write_text(json.dumps(state))
        os.utime(file, (at, at))
    old = {"node": "left", "attempt": 1, "phase": "running", "time": 1.0, "ranks": []}
    (run.path / "nodes" / "left.json").write_text(json.dumps(old))
    os.utime(run.path / "nodes" / "left.json", (1, 1))
    return run


def test_nodes_of_a_run_are_told_by_their_reports(layout: Layout) -> None:
    make_run_on_nodes(layout, "far", {"gpu1": 2, "gpu2": 40})
    lines = control_page(layout.runs_dirs).decode().splitlines()
    found = {line.rsplit(" ", 1)[0]: time.time() - float(line.split()[-1]) for line in lines if 'node="' in line}
    labels = 'cluster="east",run="far",node='
    assert found == {
        f'loopworks_run_node_report_timestamp_seconds{{{labels}"gpu1"}}': pytest.approx(2, abs=5),
        f'loopworks_run_heartbeat_timestamp_seconds{{{labels}"gpu1"}}': pytest.approx(3, abs=5),
        f'loopworks_run_node_report_timestamp_seconds{{{labels}"gpu2"}}': pytest.approx(40, abs=5),
        f'loopworks_run_heartbeat_timestamp_seconds{{{labels}"gpu2"}}': pytest.approx(41, abs=5),
    }


def test_a_run_on_nodes_is_dead_when_all_its_nodes_are_silent(layout: Layout) -> None:
    """Whoever supervises it, and its ranks, are on other machines: their processes cannot be looked at here."""
    for name, ages_s in (("one", {"gpu1": 2.0, "gpu2": 500.0}), ("none", {"gpu1": 400.0, "gpu2": 500.0})):
        run = make_run_on_nodes(layout, name, ages_s)
        target_file(run).parent.mkdir(exist_ok=True)
        target_file(run).write_text("[]")
    assert withdraw_dead_targets(layout.runs_dirs) == ["none"]
    text = control_page(layout.runs_dirs).decode()
    assert 'loopworks_run_phase{cluster="east",run="one",phase="training"} 1' in text
    assert 'loopworks_run_phase{cluster="east",run="none",phase="failed"} 1' in text


def test_a_run_here_is_told_by_its_ranks(layout: Layout) -> None:
    run = make_run(layout, "here", "training", alive=True)
    (run.path / "heartbeats").mkdir()
    beat = {"rank": 0, "pid": 1, "phase": "training", "step": 7, "time": time.time() - 20}
    (run.path / "heartbeats" / "rank-0.json").write_text(json.dumps(beat))
    (line,) = [ln for ln in control_page(layout.runs_dirs).decode().splitlines() if 'node="' in ln]
    assert line.startswith("loopworks_run_heartbeat_timestamp_seconds{")
    assert time.time() - float(line.split()[-1]) == pytest.approx(20, abs=5)


def test_ended_runs_do_not_grow_without_bound(tmp_path: Path) -> None:
    state = RunState(name="a", phase="finished", updated=100.0)
    runs = [(RunFolder(tmp_path / f"run-{number}"), state) for number in range(500)]
    few, many = (len(list(run_samples(runs[:count], 100.0))) for count in (20, 500))
    assert few == many > len(list(run_samples(runs[:19], 100.0)))


def test_entries_of_dead_runs_are_withdrawn(layout: Layout) -> None:
    for name, alive in (("lives", True), ("vanished", False)):
        run = make_run(layout, name, "training", alive=alive)
        target_file(run).parent.mkdir(exist_ok=True)
        target_file(run).write_text("[]")
    (layout.runs_dir / ".targets" / "removed.json").write_text("[]")
    assert withdraw_dead_targets(layout.runs_dirs) == ["removed", "vanished"]
    assert [path.stem for path in (layout.runs_dir / ".targets").iterdir()] == ["lives"]


def test_a_run_of_another_machine_lives_while_its_ranks_give_signs_of_life(layout: Layout) -> None:
    """It trains on a node alone, on shared storage: none of its processes is here."""
    for name, age_s, node in (("away", 40, "gpu7"), ("silent", 4000, "gpu7"), ("mine", 40, socket.gethostname())):
        run = make_run(layout, name, "training")
        (run.path / "heartbeats").mkdir()
        beat = {"rank": 0, "pid": 1, "phase": "training", "step": 7, "time": time.time() - age_s}
        (run.path / "heartbeats" / "rank-0.json").write_text(json.dumps(beat))
        target_file(run).parent.mkdir(exist_ok=True)
        target_file(run).write_text(json.dumps([{"targets": ["a:1"], "labels": {"node": node}}]))
    text = control_page(layout.runs_dirs).decode()
    for name, phase in (("away", "training"), ("silent", "failed"), ("mine", "failed")):
        assert f'loopworks_run_phase{{cluster="east",run="{name}",phase="{phase}"}} 1' in text
    assert 'loopworks_run_heartbeat_timestamp_seconds{cluster="east",run="away",node="gpu7"}' in text
    assert withdraw_dead_targets(layout.runs_dirs) == ["mine", "silent"]


def test_runs_of_several_folders_are_told_each_name_once(layout: Layout, tmp_path: Path) -> None:
    more = Layout(tmp_path / "more", layout.state_dir)
    for place, names in ((layout, ("a", "b")), (more, ("b", "c"))):
        for name in names:
            make_run(place, name, "failed")
    lines = control_page([layout.runs_dir, more.runs_dir, tmp_path / "none"]).decode().splitlines()
    told = [line for line in lines if line.startswith("loopworks_run_updated")]
    assert sorted(line.split('run="')[1][0] for line in told) == ["a", "b", "c"]
