"""A real Prometheus and Alertmanager over real runs: quiet while all is well, loud for each fault that is made."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from launch.monitor import Monitor
from launch.monitor_files import Layout
from monitoring.textfile import health, node_facts
from tests.system import monitoring_faults as faults
from tests.system.monitoring_live import (
    active_alerts,
    fast_layout,
    firing,
    free_port,
    nodes_told,
    query,
    rank_pid,
    training,
    wait_for,
    wait_for_alerts,
)
from tests.unit.monitoring.tools import needs
from training.metrics import target_file
from training.records import RunFolder, RunState

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
monitoring: {{log_interval_steps: 1, communication_sampling: 0.3}}
run: {{dir: {runs}}}
"""


NO_SAMPLES = "monitoring.communication_sampling=0"
# Steps of some hundredths of a second.
SMALL = ("model.width=64", "training.batch_size=8", NO_SAMPLES)


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
        measured = query(layout, 'run:phase:ratio5m{run="healthy", phase=~"forward|backward|optimizer"} > 0.01')
        assert len(measured) == 3
        counted = query(layout, 'train_step_seconds_count{run="healthy"} - on () train_steps_total{run="healthy"}')
        assert float(counted[0]["value"][1]) == 0, "each step is in the histogram"
        communication = query(layout, 'max_over_time(run:phase:ratio5m{run="healthy", phase="communication"}[1m])')
        # On a busy machine the two ranks really wait for each other: then, and only then, this alert is right.
        waits = bool(communication) and float(communication[0]["value"][1]) > 0.10
        assert firing(layout, run="healthy") <= ({"CommunicationShareHigh"} if waits else set())

        # A rank that stands still: no step, though nothing has ended.
        pid = rank_pid(run, 1)
        os.kill(pid, signal.SIGSTOP)
        heartbeat, failed = faults.HEALTHY_RUN_THEN_STOPPED
        wait_for_alerts(layout, [heartbeat], run="healthy")
        wait_for((run.path / "save.request").exists, "request for a checkpoint")
        wait_for(lambda: (heartbeat, "firing") in alerts_received(layout), "message about the heartbeat")
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: not (run.path / "save.request").exists(), "answer to the request")
        wait_for(lambda: heartbeat not in firing(layout, run="healthy"), "end of the alert")

        os.kill(pid, signal.SIGKILL)
        wait_for_alerts(layout, [failed], run="healthy")
        wait_for(lambda: (failed, "firing") in alerts_received(layout), "message about the failed run")


def test_each_fault_of_a_sick_run_is_told(layout: Layout, config: Path) -> None:
    run = RunFolder(layout.runs_dir / "sick")
    sick = ("training.learning_rate=1e20", "training.max_nonfinite_steps=100000", "checkpoint.max_rollbacks=0")
    with training(config, run, *sick, fault="slow_data,slow_rank"):
        wait_for_alerts(layout, faults.SICK_RUN, run="sick")
        assert not query(layout, 'train_loss{run="sick"} != train_loss{run="sick"}'), "a loss that is NaN"
        # Rank 0 dies with no chance to take its entry away.
        os.kill(rank_pid(run, 0), signal.SIGSTOP)
        wait_for_alerts(layout, faults.SICK_RUN_WITHOUT_RANK_0, run="sick")


def test_a_loss_that_spikes_is_told_and_so_is_the_way_back(layout: Layout, config: Path) -> None:
    run = RunFolder(layout.runs_dir / "spiking")
    spiking = ("checkpoint.interval_steps=20", "checkpoint.spike_patience_steps=80")
    with training(config, run, *SMALL, *spiking, fault="spike"):
        wait_for_alerts(layout, faults.SPIKING_RUN, run="spiking")


def test_a_run_that_does_not_learn_is_told_and_a_full_disk_is(layout: Layout, config: Path) -> None:
    run = RunFolder(layout.runs_dir / "stuck")
    stuck = ("training.learning_rate=1e-12", "evaluation.interval_steps=1", "evaluation.max_sequences=64")
    stuck = (*stuck, NO_SAMPLES)
    filler = layout.runs_dir / "filler"
    with training(config, run, *stuck, "checkpoint.interval_steps=40", fault="collapse"):
        wait_for_alerts(layout, faults.STUCK_RUN, run="stuck")
        assert "DiskFull" not in firing(layout)
        free = os.statvfs(layout.runs_dir)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, int(free.f_bavail * free.f_frsize * 0.99))
        wait_for_alerts(layout, faults.FULL_DISK)
    filler.unlink()
    wait_for(lambda: "DiskFull" not in firing(layout), "end of the alert")


def test_a_slow_rank_is_told_by_its_node_and_not_by_the_network(layout: Layout, config: Path, tmp_path: Path) -> None:
    """Two ranks, each on a node of its own with a fabric that is idle; that of rank 1 is late at each step."""

    def told() -> dict[str, set[str]]:
        return {alert: nodes_told(layout, alert) for alert in faults.UNEVEN_RUN}

    run = RunFolder(layout.runs_dir / "uneven")
    folders = {"n0": tmp_path / "textfile", "n1": tmp_path / "textfile-1"}
    with contextlib.ExitStack() as stack:
        for node, folder in folders.items():
            folder.mkdir()
            fabric_port(tmp_path / node, "hw_counters/tx_bytes", "hw_counters/rx_bytes")
            options = ["--sysfs", str(tmp_path / node), "--health", str(tmp_path / "none")]
            assert node_facts.main(["--out", str(folder), "--kernel-log", str(tmp_path / "none"), *options]) == 0
            stack.enter_context(node_exporter(layout, node, folder, cluster="local"))
        uneven = (f"monitoring.textfile_dir={folders['n0']}", "checkpoint.interval_steps=5")
        stack.enter_context(training(config, run, *uneven, fault="slow_rank,two_nodes"))
        wait_for(lambda: told() == faults.UNEVEN_RUN, "alerts about node and network, and no others", 180)
        wait_for(lambda: faults.UNEVEN_RUN.keys() <= active_alerts(layout), "alerts at Alertmanager")
    assert told() == faults.UNEVEN_RUN


def test_a_node_that_has_fallen_silent_is_told(layout: Layout) -> None:
    """A run on two nodes, as their agents report it to the run folder; one has stopped."""
    run = RunFolder(layout.runs_dir / "far")
    (run.path / "nodes").mkdir(parents=True)
    run.config.write_text("")
    settings = {"nodes": [{"name": "a"}, {"name": "b"}], "facts": {"a": {}, "b": {}}, "min_nodes": 1, "most_nodes": 2}
    (run.path / "nodes.json").write_text(json.dumps({**settings, "restarts": 0, "hang_s": 60, "code": "~/code"}))
    (run.path / "supervision.json").write_text(json.dumps({"pid": 999_999_999, "start": 1.0, "attempt": 1}))
    run.write_state(RunState(name="far", phase="training", started=time.time()))
    beats = [{"rank": 0, "pid": 1, "phase": "training", "step": 7, "time": time.time()}]

    def report(node: str) -> None:
        state = {"node": node, "attempt": 1, "phase": "running", "time": time.time(), "ranks": beats}
        (run.path / "nodes" / f"{node}.json").write_text(json.dumps(state))

    def both_are_seen() -> bool:
        report("a")
        report("b")
        return len(query(layout, 'loopworks_run_node_report_timestamp_seconds{run="far"}')) == 2

    def one_is_missed() -> bool:
        report("a")
        return bool(firing(layout, run="far"))

    wait_for(both_are_seen, "reports of both nodes")
    assert not firing(layout, run="far")
    wait_for(one_is_missed, "alert about the node")
    assert firing(layout, run="far", node="b") == set(faults.SILENT_NODE)
    assert not firing(layout, run="far", node="a")
    wait_for_alerts(layout, faults.SILENT_NODE)
    shutil.rmtree(run.path)


def test_a_run_that_is_started_again_and_again_is_told(layout: Layout, config: Path) -> None:
    """Each time its only rank is killed, and it goes on from its newest checkpoint as a user lets it."""
    run = RunFolder(layout.runs_dir / "restarting")
    alone = (f"run.dir={layout.runs_dir}", *SMALL, "distributed.ranks_per_node=1", "checkpoint.interval_steps=20")

    def goes_on_after(restarts: int) -> bool:
        # Of a target that has been killed the last samples stay for minutes, unless it does not answer.
        up = query(layout, 'up{run="restarting"} == 1')
        found = query(layout, 'sum(train_restarts_total{run="restarting"})')
        saved = any(event.kind == "checkpoint" for event in run.read_events())
        return bool(up) and bool(found) and float(found[0]["value"][1]) == restarts and saved

    for restarts in range(4):
        with training(None if restarts else config, run, *alone):
            wait_for(partial(goes_on_after, restarts), f"start after {restarts} others", 120)
            if restarts < 3:
                assert "RunRestarting" not in firing(layout, run="restarting")
            else:
                wait_for_alerts(layout, faults.RESTARTED_RUN, run="restarting")
    target_file(run).unlink()
    assert query(layout, 'max_over_time(train_restarts_total{run="restarting", reason="failure"}[10m]) == 3')


def fabric_port(sysfs: Path, *counters: str) -> None:
    """An EFA device with an active port and such counters."""
    port = sysfs / "class" / "infiniband" / "rdmap0" / "ports" / "1"
    for name, text in {
        "state": "4: ACTIVE\n",
        "rate": "100 Gb/sec (4X EDR)\n",
        **dict.fromkeys(counters, "1\n"),
    }.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(text)


@contextlib.contextmanager
def node_exporter(layout: Layout, node: str, textfiles: Path, cluster: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node_exporter that Prometheus scrapes as that of `node`."""
    address, target = f"127.0.0.1:{free_port()}", layout.state_dir / "targets" / "node" / f"{node}.json"
    exporter = subprocess.Popen(
        [
            *("prometheus-node-exporter", f"--web.listen-address={address}", "--collector.disable-defaults"),
            *("--collector.textfile", f"--collector.textfile.directory={textfiles}"),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        target.write_text(json.dumps([{"targets": [address], "labels": {"cluster": cluster, "node": node}}]))
        yield exporter
    finally:
        target.unlink()
        exporter.terminate()
        exporter.wait(10)


def test_faults_of_a_node_are_told_and_acted_on(layout: Layout, tmp_path: Path) -> None:
    """As its timers do it: health checks, facts, node_exporter. A mount is missing, an EFA device has no counters."""
    node_json, report = tmp_path / "node.json", tmp_path / "health.json"
    node_json.write_text('{"gpus": 0, "mounts": ["/not/mounted"]}')
    assert health.main(["--out", str(report), "--node", str(node_json)]) == 0
    fabric_port(tmp_path / "sys")
    (tmp_path / "spot").touch()
    (tmp_path / "textfile").mkdir()
    options = ["--out", str(tmp_path / "textfile"), "--sysfs", str(tmp_path / "sys"), "--spot", str(tmp_path / "spot")]
    assert node_facts.main([*options, "--health", str(report), "--kernel-log", str(tmp_path / "none")]) == 0
    with node_exporter(layout, "n9", tmp_path / "textfile", cluster="c") as exporter:
        wait_for_alerts(layout, faults.SICK_NODE, node="n9")
        assert query(layout, 'ALERTS{alertname="HealthCheckFailed", check="mount:/not/mounted"}')
        drained = layout.state_dir / "drained.jsonl"
        wait_for(drained.exists, "drained node")
        assert json.loads(drained.read_text().splitlines()[0])["node"] == "n9"
        exporter.terminate()
        wait_for_alerts(layout, faults.DEAD_NODE, node="n9")


def test_the_rules_take_a_small_part_of_their_interval(layout: Layout) -> None:
    """At the interval of the files, 15 s; here they run thirty times as often."""
    slowest = query(layout, "max(prometheus_rule_group_last_duration_seconds)")
    assert float(slowest[0]["value"][1]) < 0.1 * 15
