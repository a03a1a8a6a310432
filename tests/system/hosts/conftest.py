"""Fixtures of the tests on real hosts: three hosts for the session, runs on them, and proof that nothing stays."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.lease import LEASE_VARIABLE
from tests.system.conftest import CHECKOUT, TINY, fab_command
from tests.system.hosts.cluster import Cluster, Host, running
from tests.system.hosts.needs import needs_root_and
from tests.system.hosts.tree import root_tree
from training.records import RunFolder

TOOLS = ("systemd-nspawn", "mmdebstrap", "ip", "ssh-keygen")
HOSTS = 3
SMALL_DISK_BYTES = 24 * 2**20
LONG = ("training.max_steps=100000", "training.lr_schedule=constant", "checkpoint.interval_steps=3")
# Seconds of silence after which a node is lost, where a test would mostly wait for the usual 15.
SHORT_LEASE_S = "6"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts that share one folder with this machine."""
    needs_root_and(TOOLS)
    base = tmp_path_factory.mktemp("hosts")
    shared = base / "shared"
    small = shared / "small"
    small.mkdir(parents=True)
    python = [CHECKOUT / ".venv" if (CHECKOUT / ".venv").is_dir() else Path(sys.prefix), Path(sys.base_prefix)]
    places = [path for path in dict.fromkeys(python) if not str(path).startswith(("/usr", "/bin"))]
    state = Path("/var/tmp") / f"loopworks-hosts-{os.getpid()}"
    made = Cluster(state, root_tree(), HOSTS, name="lwt", network="10.87.0", read_only=places, shared=[shared])
    with small_disk(small), running(made) as hosts:
        yield hosts


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Inside the block `folder` is a file system that is soon full."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "loopworks", str(folder)]
    subprocess.run(mount, check=True, timeout=20)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


@pytest.fixture(scope="session")
def shared(cluster: Cluster) -> Path:
    """The folder that all hosts and this machine see."""
    return cluster.shared[0]


@pytest.fixture(scope="session")
def shared_config(shared: Path, tiny_dataset: Path) -> Path:
    """A configuration whose data and runs lie in the shared folder."""
    shutil.copytree(tiny_dataset, shared / "tiny")
    path = shared / "tiny.yaml"
    path.write_text(TINY.format(data=shared / "tiny", runs=shared / "runs") + "distributed: {ranks_per_node: 1}\n")
    return path


@pytest.fixture
def call(cluster: Cluster, shared_config: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Calls a fab task that takes --config, with the hosts' ssh configuration."""

    def run(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            fab_command(*arguments),
            cwd=CHECKOUT,
            env={**os.environ, "LOOPWORKS_SSH_CONFIG": str(cluster.ssh_config)},
            capture_output=True,
            text=True,
            timeout=timeout_s * busy(),
            check=False,
        )

    return run


def busy() -> float:
    """How much longer things take because others use this machine too: 1 when it is idle enough for two ranks."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) - 1)


class LongRun:
    """A run on hosts that would go on for long."""

    def __init__(
        self, cluster: Cluster, config: Path, runs: Path, name: str, *arguments: str, lease_s: str = ""
    ) -> None:
        self.folder = RunFolder(runs / name)
        self.runs = runs
        settings = [part for item in LONG for part in ("--set", item)]
        self._environment = {**os.environ, "LOOPWORKS_SSH_CONFIG": str(cluster.ssh_config), LEASE_VARIABLE: lease_s}
        self.process = self.call("train", "--config", str(config), "--name", name, *settings, *arguments)

    def call(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts a fab task in a session of its own."""
        return subprocess.Popen(
            fab_command(*arguments),
            cwd=CHECKOUT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def step(self) -> int:
        """The last step in metrics.jsonl."""
        metrics = self.folder.read_metrics()
        return metrics[-1].step if metrics else 0

    def supervision(self) -> dict[str, Any]:
        """What the supervisor says."""
        path = self.folder.path / "supervision.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def supervisor(self) -> psutil.Process:
        """The supervisor's process."""
        return psutil.Process(self.supervision()["pid"])

    def is_watched(self) -> bool:
        """True when its supervisor is alive."""
        return psutil.pid_exists(self.supervision()["pid"])

    def reaches(self, steps: int) -> None:
        """Waits until the run has done `steps`."""
        wait_for(lambda: self.step() >= steps, f"step {steps}", 90 * busy(), self.diagnosis)

    def recovers(self, attempt: int, fault: float) -> float:
        """Waits for a training step of a later attempt; returns the seconds since the fault, as on an idle machine."""
        timeout_s = 60 * busy()
        wait_for(
            lambda: self.supervision().get("attempt", 0) >= attempt and self.supervision()["phase"] == "running",
            f"attempt {attempt}",
            timeout_s,
            self.diagnosis,
        )
        restarted = max(e.time for e in self.folder.read_events() if e.kind == "nodes")
        left = timeout_s - (time.time() - fault)
        wait_for(lambda: any(m.time > restarted for m in self.folder.read_metrics()), "a step", left, self.diagnosis)
        return (time.time() - fault) * 60 / timeout_s

    def diagnosis(self) -> str:
        """What to read when it does not go on."""
        logs = sorted(self.folder.logs.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


@pytest.fixture
def long_run(cluster: Cluster, shared: Path, shared_config: Path) -> Iterator[Callable[..., LongRun]]:
    """Starts long runs; at the end they are ended whatever happened."""
    started: list[LongRun] = []

    def start(name: str, *arguments: str, runs: Path = shared / "runs", **more: Any) -> LongRun:
        started.append(LongRun(cluster, shared_config, runs, name, *arguments, **more))
        return started[-1]

    yield start
    for run in started:
        if run.supervision().get("phase") != "ended":  # the test has failed: the proof below is not for it
            _kill(run.folder.path)
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster, shared: Path) -> Iterator[None]:
    """All hosts are well again after each test; processes of runs that are still there fail it."""
    yield
    for host in cluster.hosts:
        host.thaw()
        host.mend()
        if not host.is_up():
            host.boot()
    for host in cluster.hosts:
        host.wait()
    deadline = time.monotonic() + 20
    while (left := _of_runs(shared)) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = [f"{process.pid} {' '.join(process.cmdline()[:6])}" for process in left if process.is_running()]
    for process in left:
        process.kill()
    assert not left, f"processes of runs were still alive: {names}"


def _kill(folder: Path) -> None:
    """Ends a run by force, its supervisor first."""
    for process in sorted(_of_runs(folder), key=lambda one: "launch.supervisor" not in one.cmdline()):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _of_runs(shared: Path) -> list[psutil.Process]:
    """Ranks, agents and supervisors of runs in the shared folder, on all hosts and here (one kernel sees all)."""
    found = []
    for process in psutil.process_iter():
        try:
            of_run = process.environ().get("LOOPWORKS_RUN", "").startswith(str(shared))
            words = process.cmdline()
            supervisor = "launch.supervisor" in words and words[-1].startswith(str(shared))
            if process.status() != psutil.STATUS_ZOMBIE and (of_run or supervisor):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def wait_for(
    condition: Callable[[], bool], what: str, timeout_s: float = 60, diagnosis: Callable[[], str] = str
) -> None:
    """Polls until `condition`; fails with the diagnosis when it does not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"no {what} within {timeout_s:.0f} s\n{diagnosis()}")
        time.sleep(0.1)


def rank_on(host: Host, run: RunFolder) -> psutil.Process:
    """The rank of a run on a host with one rank."""
    ranks = [p for p in host.processes_of_run(run.path) if {"RANK", "OMPI_COMM_WORLD_RANK"} & p.environ().keys()]
    assert ranks, f"no rank on {host.name}"
    return ranks[0]
