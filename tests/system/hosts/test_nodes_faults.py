"""Faults during a run on real hosts: each ends in recovery or in one clear message, and no process is left anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.conftest import CHECKOUT, fab_command
from tests.system.hosts.cluster import Cluster, Host
from tests.system.hosts.conftest import SHORT_LEASE_S, LongRun, busy, rank_on, wait_for

pytestmark = pytest.mark.system
Call = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., LongRun]
# Recovery to the next training step, seconds, on idle hosts; CI may be busy.
RECOVERY_S = 60.0


def end(call: Call, run: LongRun) -> str:
    """Stops a run and returns what the command that started it said."""
    stopped = call("stop", "--dir", str(run.runs), "--run", run.folder.name)
    assert stopped.returncode == 0, stopped.stderr
    output, errors = run.process.communicate(timeout=30 * busy())
    assert "Traceback" not in output + errors
    return output + errors


def empty(host: Host, run: LongRun) -> bool:
    return not host.processes_of_run(run.folder.path)


def test_killed_rank_then_killed_supervisor(call: Call, cluster: Cluster, long_run: Start) -> None:
    run = long_run("rank", "--nodes", "lwt1,lwt2")
    run.reaches(4)
    fault = time.time()
    rank_on(cluster.hosts[1], run.folder).kill()
    assert run.recovers(2, fault) < RECOVERY_S
    restart = next(event for event in run.folder.read_events() if event.kind == "restart")
    assert "rank 1 on lwt2 died" in restart.message
    assert restart.details["blame"] == {"lwt2": 1}
    assert any(event.kind == "resume" for event in run.folder.read_events())

    killed = run.supervision()["pid"]
    run.supervisor().kill()
    _, errors = run.process.communicate(timeout=30 * busy())
    assert run.process.returncode == 1
    assert "supervisor is gone" in errors
    assert "fab attach" in errors
    before = run.step()
    run.reaches(before + 3)  # nobody watches, and it goes on
    again = run.call("attach", "--dir", str(run.runs), "--run", "rank")
    # The killed one may still be in the table of processes: nobody has to fetch its exit code.
    wait_for(lambda: run.supervision()["pid"] != killed and run.is_watched(), "another supervisor")
    time.sleep(1)
    again.send_signal(signal.SIGINT)
    _, errors = again.communicate(timeout=30 * busy())
    assert again.returncode == 130
    assert "detached; the run goes on" in errors
    assert run.is_watched()
    assert run.supervision()["attempt"] == 2, "the new supervisor takes over, it does not start again"
    stopped = call("stop", "--dir", str(run.runs), "--run", "rank")
    assert stopped.returncode == 0, stopped.stderr


def test_power_cut_host_is_replaced_by_a_spare(call: Call, cluster: Cluster, long_run: Start) -> None:
    run = long_run("power", "--nodes", "lwt1,lwt2", "--spares", "lwt3", lease_s=SHORT_LEASE_S)
    run.reaches(4)
    fault = time.time()
    cluster.hosts[1].kill()
    assert run.recovers(2, fault) < RECOVERY_S
    assert run.supervision()["active"] == ["lwt1", "lwt3"]
    assert "lost lwt2" in run.supervision()["message"]
    end(call, run)


def test_cut_network_ends_the_ranks_on_both_sides(call: Call, cluster: Cluster, long_run: Start) -> None:
    run = long_run("cut", "--nodes", "lwt1,lwt2", "--min-nodes", "1", lease_s=SHORT_LEASE_S)
    run.reaches(4)
    fault = time.time()
    cluster.hosts[1].cut()
    assert run.recovers(2, fault) < RECOVERY_S
    assert run.supervision()["active"] == ["lwt1"]
    wait_for(lambda: empty(cluster.hosts[1], run), "end of the ranks on the host that is cut off", 60 * busy())
    assert time.time() - fault < 60 * busy()
    end(call, run)


def test_frozen_host_is_left_and_ends_its_ranks_when_it_wakes(call: Call, cluster: Cluster, long_run: Start) -> None:
    """The hardest one: connections stay open and nobody answers. With the lease that users have."""
    run = long_run("frozen", "--nodes", "lwt1,lwt2", "--spares", "lwt3")
    run.reaches(4)
    fault = time.time()
    cluster.hosts[1].freeze()
    assert run.recovers(2, fault) < RECOVERY_S
    assert run.supervision()["active"] == ["lwt1", "lwt3"]
    cluster.hosts[1].thaw()
    wait_for(lambda: empty(cluster.hosts[1], run), "end of the ranks on the host that woke", 30 * busy())
    end(call, run)


def test_hung_rank_leaves_its_stack_and_the_budget_ends_the_run(cluster: Cluster, long_run: Start) -> None:
    run = long_run("hang", "--nodes", "lwt1,lwt2", "--hang-timeout", "5", "--restarts", "0")
    run.reaches(4)
    rank_on(cluster.hosts[1], run.folder).send_signal(signal.SIGSTOP)
    _, errors = run.process.communicate(timeout=60 * busy())
    assert run.process.returncode == 1
    assert "hang: rank" in errors
    assert "budget of 0 restart(s) is used up" in errors
    assert "fab resume" in errors
    # Rank 0 waits for the one that hangs, and says where.
    assert "_agree" in run.folder.rank_log(0).read_text() or "Thread 0x" in run.folder.rank_log(0).read_text()


def test_a_run_ends_well_without_the_ssh_daemon(
    call: Call, cluster: Cluster, shared: Path, shared_config: Path
) -> None:
    arguments = ("--nodes", "lwt1,lwt2", "--config", str(shared_config), "--name", "nossh", "--json")
    command = fab_command("train", *arguments, "--set", "training.max_steps=20")
    process = subprocess.Popen(
        command,
        cwd=CHECKOUT,
        env={**os.environ, "LOOPWORKS_SSH_CONFIG": str(cluster.ssh_config)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for((shared / "runs/nossh/metrics.jsonl").exists, "first step", 60 * busy())
    cluster.hosts[1].ssh("systemctl stop ssh", check=False)
    output, errors = process.communicate(timeout=90 * busy())
    assert process.returncode == 0, errors
    assert json.loads(output)["steps"] == 20
    assert not cluster.hosts[1].processes_of_run(shared / "runs/nossh")
    cluster.hosts[1].kill()  # boots again after the test


def test_a_full_disk_is_said_and_not_tried_again(cluster: Cluster, shared: Path, long_run: Start) -> None:
    run = long_run("full", "--nodes", "lwt1,lwt2", "--set", f"run.dir={shared}/small", runs=shared / "small")
    run.reaches(3)
    deadline = time.monotonic() + 60 * busy()
    try:
        with (shared / "small" / "ballast").open("wb", buffering=0) as ballast:
            while run.process.poll() is None and time.monotonic() < deadline:
                # Again and again: room that an older checkpoint gives back would let the run go on.
                with contextlib.suppress(OSError):
                    while True:
                        ballast.write(b"x" * 4096)
                time.sleep(0.05)
        _, errors = run.process.communicate(timeout=1)
    finally:
        (shared / "small" / "ballast").unlink()
    assert run.process.returncode == 2, errors
    assert "full" in errors or "No space left" in errors
    assert "next: free space" in errors
    assert run.supervision()["attempt"] == 1
    assert all(empty(host, run) for host in cluster.hosts)


def test_stop_before_the_first_step_starts_nothing_again(call: Call, cluster: Cluster, long_run: Start) -> None:
    run = long_run("early", "--nodes", "lwt1,lwt2")
    wait_for(lambda: run.supervision().get("phase") == "running", "start of the agents", 60 * busy())
    end(call, run)
    assert run.process.returncode == 130
    assert run.supervision()["attempt"] == 1
    assert run.folder.read_state().phase == "stopped"
