"""A real Prometheus and Alertmanager over real runs: quiet while all is well, loud for each fault that is made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.monitor import Monitor
from launch.monitor_files import Layout
from monitoring.textfile import node_facts
from tests.system.monitoring_live import fast_layout, firing, query, rank_pid, training, wait_for
from tests.unit.monitoring.tools import needs
from training.records import RunFolder

pytestmark = [
    pytest.mark.system,
    needs("prometheus", "prometheus-alertmanager", "prometheus-node-exporter"),
]

# Steps of about a tenth of a second, so that what is measured is the step and not the loop around it.
MODEL = """
model: {{preset: null, vocab_size: 320, context_length: 32, width: 128, heads: 4, mlp_width: 256,
        prelude_layers: 1, core_layers: 1, coda_layers: 1, mean_recurrence: 6, backprop_depth: 3}}
data: {{path: {data}}}
training: {{batch_size: 32, max_steps: 100000, learning_rate: 3e-4, precision: fp32, lr_schedule: constant}}
evaluation: {{recurrences: [1, 3], max_sequences: 8, sample_tokens: 4}}
monitoring: {{log_interval_steps: 1, communication_sampling: 0.9}}
run: {{dir: {runs}}}
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Folders for runs, on a small disk of their own, and for monitoring."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small disk")
    root = tmp_path_factory.mktemp("monitoring")
    runs = root / "runs"
    runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(runs)], check=True, timeout=30)
    try:
        yield runs, root / "state"
    finally:
        subprocess.run(["umount", "--lazy", str(runs)], check=True, timeout=30)


@pytest.fixture(scope="module")
def layout(places: tuple[Path, Path]) -> Iterator[Layout]:
    """A monitor that runs."""
    made = fast_layout(*places)
    with Monitor(made, tell=lambda _: None):
        yield made


@pytest.fixture(scope="module")
def config(places: tuple[Path, Path], tiny_dataset: Path) -> Path:
    path = places[0].parent / "config.yaml"
    path.write_text(MODEL.format(data=tiny_dataset, runs=places[0]))
    return path


def alerts_received(layout: Layout) -> set[tuple[str, str]]:
    """What Alertmanager has passed on: (name, status)."""
    record = layout.state_dir / "alerts.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    return {(alert["labels"]["alertname"], alert["status"]) for line in lines for alert in json.loads(line)["alerts"]}


def test_a_healthy_run_is_quiet_and_its_faults_are_not(layout: Layout, config: Path) -> None:
    run = RunFolder(layout.runs_dir / "healthy")
    with training(config, run, "checkpoint.interval_steps=5"):
        wait_for(lambda: bool(query(layout, 'train_steps_total{run="healthy"} > 20')), "scraped steps")
        # Longer than any window of the fast rules that needs two samples, and than their `for`.
        wait_for(lambda: bool(query(layout, 'train_wall_seconds{run="healthy"} > 18')), "time to find fault")
        assert query(layout, 'run:phase:ratio5m{run="healthy", phase="forward"}')
        communication = query(layout, 'max_over_time(run:phase:ratio5m{run="healthy", phase="communication"}[1m])')
        # On a busy machine the two ranks really wait for each other: then, and only then, this alert is right.
        waits = bool(communication) and float(communication[0]["value"][1]) > 0.10
        assert firing(layout, run="healthy") <= ({"CommunicationShareHigh"} if waits else set())

        # A rank that stands still: no step, though nothing has ended.
        pid = rank_pid(run, 1)
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: "TrainingHeartbeatLost" in firing(layout, run="healthy"), "alert about the heartbeat")
        wait_for((run.path / "save.request").exists, "request for a checkpoint")
        told = ("TrainingHeartbeatLost", "firing")
        wait_for(lambda: told in alerts_received(layout), "message about the heartbeat")
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: not (run.path / "save.request").exists(), "answer to the request")
        wait_for(lambda: "TrainingHeartbeatLost" not in firing(layout, run="healthy"), "end of the alert")

        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: "RunFailed" in firing(layout, run="healthy"), "alert about the failed run")
        wait_for(lambda: ("RunFailed", "firing") in alerts_received(layout), "message about the failed run")


def test_each_fault_of_a_sick_run_is_told(layout: Layout, config: Path) -> None:
    run = RunFolder(layout.runs_dir / "sick")
    sick = ("training.learning_rate=1e20", "training.max_nonfinite_steps=100000", "checkpoint.max_rollbacks=0")
    with training(config, run, *sick, fault="slow_data,slow_rank"):
        for alert in ("TrainingNonFinite", "DataWaitHigh", "CommunicationShareHigh", "CheckpointStale"):
            wait_for(lambda alert=alert: alert in firing(layout, run="sick"), f"alert {alert}")
        assert not query(layout, 'train_loss{run="sick"} != train_loss{run="sick"}'), "a loss that is NaN"
        # Rank 0 dies with no chance to take its entry away.
        os.kill(rank_pid(run, 0), signal.SIGSTOP)
        wait_for(lambda: "TrainingTargetDown" in firing(layout, run="sick"), "alert about the target")


def test_a_disk_that_is_full_is_told(layout: Layout) -> None:
    assert "DiskFull" not in firing(layout)
    filler = layout.runs_dir / "filler"
    free = os.statvfs(layout.runs_dir)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, int(free.f_bavail * free.f_frsize * 0.99))
    wait_for(lambda: "DiskFull" in firing(layout), "alert about the disk")
    filler.unlink()
    wait_for(lambda: "DiskFull" not in firing(layout), "end of the alert")


def test_faults_of_a_node_are_told_and_acted_on(layout: Layout, tmp_path: Path) -> None:
    port = tmp_path / "sys" / "class" / "infiniband" / "rdmap0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (tmp_path / "spot").touch()
    (tmp_path / "health.json").write_text(json.dumps({"checks": {"nccl": "failed"}, "time": 1}))
    (tmp_path / "textfile").mkdir()
    options = ["--out", str(tmp_path / "textfile"), "--sysfs", str(tmp_path / "sys"), "--spot", str(tmp_path / "spot")]
    assert node_facts.main([*options, "--health", str(tmp_path / "health.json")]) == 0
    address = f"127.0.0.1:{layout.ports.grafana}"  # free: no Grafana here
    exporter = subprocess.Popen(
        [
            *("prometheus-node-exporter", f"--web.listen-address={address}", "--collector.disable-defaults"),
            *("--collector.textfile", f"--collector.textfile.directory={tmp_path / 'textfile'}"),
        ],
        stderr=subprocess.DEVNULL,
    )
    targets = layout.state_dir / "targets" / "node"
    targets.mkdir(parents=True, exist_ok=True)
    try:
        entry = [{"targets": [address], "labels": {"cluster": "c", "node": "n1"}}]
        (targets / "n1.json").write_text(json.dumps(entry))
        for alert in ("SpotNotice", "HealthCheckFailed", "FabricCountersMissing"):
            wait_for(lambda alert=alert: alert in firing(layout, node="n1"), f"alert {alert}")
        drained = layout.state_dir / "drained.jsonl"
        wait_for(drained.exists, "drained node")
        assert json.loads(drained.read_text().splitlines()[0])["node"] == "n1"
        exporter.terminate()
        wait_for(lambda: "TargetDown" in firing(layout, node="n1"), "alert about the node")
    finally:
        exporter.terminate()
        exporter.wait(10)
        (targets / "n1.json").unlink(missing_ok=True)


def test_the_rules_take_a_small_part_of_their_interval(layout: Layout) -> None:
    """At the interval of the files, 15 s; here they run thirty times as often."""
    slowest = query(layout, "max(prometheus_rule_group_last_duration_seconds)")
    assert float(slowest[0]["value"][1]) < 0.1 * 15
