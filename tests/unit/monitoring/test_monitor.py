"""What `fab monitor` writes and starts, and what it tells of the runs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import yaml

from launch.errors import UsageError
from launch.monitor import Monitor, check_drainer, control_page, monitor_layout, run_samples, withdraw_dead_targets
from launch.monitor_files import (
    MONITORING,
    Layout,
    Ports,
    grafana_program,
    local_alertmanager,
    local_config,
    local_nginx,
    programs,
    write_files,
)
from tests.unit.monitoring.tools import known_series, needs
from training.metrics import target_file
from training.records import Phase, RunFolder, RunState

BASE = yaml.safe_load((MONITORING / "prometheus" / "prometheus.yml").read_text())


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


def test_only_paths_ports_and_intervals_differ_from_a_clusters(layout: Layout) -> None:
    config = local_config(BASE, layout)
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs["training"]["file_sd_configs"][0]["files"] == [str(layout.runs_dir / ".targets" / "*.json")]
    assert jobs["control"]["static_configs"] == [{"targets": ["127.0.0.1:3"]}]
    assert config["rule_files"] == [str(MONITORING / "rules" / "*.yml")]
    for before in BASE["scrape_configs"]:
        after = jobs[before["job_name"]]
        for key in ("relabel_configs", "metric_relabel_configs", "sample_limit", "label_limit", "honor_labels"):
            assert after.get(key) == before.get(key)


def test_a_label_that_grows_is_refused_in_every_job() -> None:
    assert all("sample_limit" in job for job in BASE["scrape_configs"] if "file_sd_configs" in job)


def test_what_node_exporter_says_is_kept_when_a_rule_or_panel_needs_it() -> None:
    import re

    (job,) = [job for job in BASE["scrape_configs"] if job["job_name"] == "node"]
    keep = re.compile(job["metric_relabel_configs"][0]["regex"])
    assert job["metric_relabel_configs"][0]["action"] == "keep"
    wanted = [name for name in known_series() if name.startswith(("node_", "loopworks_"))]
    assert all(keep.fullmatch(name) for name in wanted)
    assert not keep.fullmatch("node_scrape_collector_duration_seconds")


@needs("promtool", "amtool", "prometheus", "prometheus-alertmanager")
def test_the_tools_accept_what_is_written(layout: Layout) -> None:
    write_files(layout)
    for command in (
        ["promtool", "check", "config", str(layout.state_dir / "prometheus.yml")],
        ["amtool", "check-config", str(layout.state_dir / "alertmanager.yml")],
        ["promtool", "check", "config", "--syntax-only", str(MONITORING / "prometheus" / "prometheus.yml")],
    ):
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_the_webhook_of_the_local_alertmanager_is_ours(layout: Layout) -> None:
    text = local_alertmanager((MONITORING / "alertmanager" / "alertmanager.yml").read_text(), layout)
    assert "http://127.0.0.1:3/actions" in text
    assert "9402" not in text


def test_nginx_listens_on_loopback_alone(layout: Layout) -> None:
    text = local_nginx((MONITORING / "nginx" / "loopworks.conf").read_text(), layout)
    assert "listen 127.0.0.1:5;" in text
    assert "proxy_pass http://127.0.0.1:1;" in text
    assert "deny all;" in text


def test_grafana_gets_its_boards_and_stays_on_loopback(layout: Layout) -> None:
    write_files(layout)
    program = grafana_program("/usr/sbin/grafana-server", layout)
    assert program.env["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    source = yaml.safe_load((layout.state_dir / "provisioning" / "datasources" / "prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://127.0.0.1:1/prometheus"
    assert source["datasources"][0]["uid"] == "loopworks-prometheus"
    boards = yaml.safe_load((layout.state_dir / "provisioning" / "dashboards" / "loopworks.yml").read_text())
    assert list(Path(boards["providers"][0]["options"]["path"]).glob("*.json"))


def test_each_program_listens_on_loopback(layout: Layout) -> None:
    started = programs(layout, found=lambda name: f"/usr/bin/{name}")
    assert [program.name for program in started] == ["alertmanager", "prometheus", "grafana", "nginx"]
    for program in started:
        assert "127.0.0.1" in program.ready
        assert not any("0.0.0.0" in argument for argument in program.argv)


def test_without_prometheus_it_says_how_to_have_it(layout: Layout) -> None:
    with pytest.raises(UsageError, match="fab report") as caught:
        programs(layout, found=lambda _: None)
    assert caught.value.exit_code == 2


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        layout = Layout(tmp_path / "runs", tmp_path / "state", Ports(prometheus=port))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("launch.monitor.programs", lambda _: [])
            with pytest.raises(UsageError, match=str(port)), Monitor(layout):
                pass
    assert not layout.state_dir.exists()


def test_runs_are_told_with_their_cluster(layout: Layout) -> None:
    make_run(layout, "lives", "training", alive=True)
    make_run(layout, "broke", "failed")
    make_run(layout, "old", "failed", updated_ago_s=90_000)
    make_run(layout, "vanished", "training")
    make_run_on_nodes(layout, "far", {"gpu1": 2, "gpu2": 40})
    text = control_page(layout.runs_dir).decode()
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
    settings = {"nodes": [{"name": node} for node in ages_s], "facts": {node: {} for node in ages_s}}
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
    lines = control_page(layout.runs_dir).decode().splitlines()
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
    assert withdraw_dead_targets(layout.runs_dir) == ["none"]
    text = control_page(layout.runs_dir).decode()
    assert 'loopworks_run_phase{cluster="east",run="one",phase="training"} 1' in text
    assert 'loopworks_run_phase{cluster="east",run="none",phase="failed"} 1' in text


def test_a_run_here_is_told_by_its_ranks(layout: Layout) -> None:
    run = make_run(layout, "here", "training", alive=True)
    (run.path / "heartbeats").mkdir()
    beat = {"rank": 0, "pid": 1, "phase": "training", "step": 7, "time": time.time() - 20}
    (run.path / "heartbeats" / "rank-0.json").write_text(json.dumps(beat))
    (line,) = [ln for ln in control_page(layout.runs_dir).decode().splitlines() if 'node="' in ln]
    assert line.startswith("loopworks_run_heartbeat_timestamp_seconds{")
    assert time.time() - float(line.split()[-1]) == pytest.approx(20, abs=5)


def test_ended_runs_do_not_grow_without_bound(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a")
    run.path.mkdir()
    run.config.write_text("")
    state = RunState(name="a", phase="finished", updated=100.0)
    few, many = (len(list(run_samples([(run, state)] * count, 100.0))) for count in (20, 500))
    assert few == many


def test_entries_of_dead_runs_are_withdrawn(layout: Layout) -> None:
    for name, alive in (("lives", True), ("vanished", False)):
        run = make_run(layout, name, "training", alive=alive)
        target_file(run).parent.mkdir(exist_ok=True)
        target_file(run).write_text("[]")
    (layout.runs_dir / ".targets" / "removed.json").write_text("[]")
    assert withdraw_dead_targets(layout.runs_dir) == ["removed", "vanished"]
    assert [path.stem for path in (layout.runs_dir / ".targets").iterdir()] == ["lives"]


@pytest.mark.parametrize("base", [80, 65533, -1])
def test_a_port_base_that_cannot_be(base: int) -> None:
    with pytest.raises(UsageError, match="--port-base"):
        monitor_layout("runs", None, base)


def test_ports_follow_the_base(tmp_path: Path) -> None:
    assert monitor_layout(str(tmp_path), None, 19000).ports == Ports(19000, 19001, 19002, 19003, 19004)
    assert monitor_layout(str(tmp_path), None, None).ports == Ports()
    assert monitor_layout(str(tmp_path), None, None).state_dir == tmp_path / ".monitor"


def test_ways_to_drain() -> None:
    assert check_drainer("slurm") == "slurm"
    with pytest.raises(UsageError, match="kubernetes"):
        check_drainer("reboot")
