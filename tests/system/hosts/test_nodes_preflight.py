"""Faults that are found before a run starts: one message with everything, exit code 3, and nothing was started."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.hosts.cluster import Cluster, Host

pytestmark = pytest.mark.system
Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def refused(call: Call, shared: Path, shared_config: Path) -> Callable[..., str]:
    """Calls fab train, which must end with exit code 3 and no run; returns the message."""

    def train(*arguments: str) -> str:
        outcome = call("train", "--config", str(shared_config), "--name", "refused", *arguments, timeout_s=60)
        assert outcome.returncode == 3, outcome.stderr + outcome.stdout
        assert "next: " in outcome.stderr
        assert "Traceback" not in outcome.stderr
        assert not (shared / "runs" / "refused").exists()
        return outcome.stderr

    return train


@pytest.fixture
def other_host_key(cluster: Cluster) -> Iterator[Host]:
    """A host that was installed anew: it shows another key than the known one."""
    host = cluster.hosts[1]
    known = cluster.known_hosts.read_text()
    host.new_host_key()
    cluster.known_hosts.write_text(known)
    host.kill()
    host.boot()
    # It answers, but not with the key that is known.
    lenient = ["ssh", "-F", str(cluster.ssh_config), "-o", "StrictHostKeyChecking=no", "-o", "ConnectTimeout=3"]
    lenient += ["-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes", host.name, "true"]
    for _ in range(50):
        if subprocess.run(lenient, capture_output=True, timeout=20, check=False).returncode == 0:
            break
    yield host
    cluster.write_known_hosts()


def test_all_nodes_pass_and_reach_each_other(call: Call, shared_config: Path) -> None:
    outcome = call("preflight", "--nodes", "lwt1,lwt2,lwt3", "--config", str(shared_config), "--json")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    report = json.loads(outcome.stdout)
    assert report["ok"]
    assert {finding["node"] for finding in report["findings"]} == {"lwt1", "lwt2", "lwt3"}
    checks = {finding["check"] for finding in report["findings"]}
    assert {
        "reachable",
        "torch",
        "deepspeed",
        "python",
        "clock",
        "run.dir",
        "gpus",
        "rendezvous",
        "all-reduce",
    } <= checks
    rate = next(finding["message"] for finding in report["findings"] if finding["check"] == "all-reduce")
    assert "GB/s by gloo over 3 nodes" in rate


def test_changed_host_key(refused: Callable[..., str], other_host_key: Host) -> None:
    message = refused("--nodes", "lwt1,lwt2")
    assert "lwt2: host key: its host key has CHANGED" in message
    assert "ssh-keygen -R" in message


def test_every_fault_is_in_one_list(call: Call, cluster: Cluster, refused: Callable[..., str]) -> None:
    """A host that refuses the key, one with another torch, one that does not resolve."""
    cluster.hosts[1].ssh("mv /root/.ssh/authorized_keys /root/.ssh/away")
    other = "/root/other-python"
    # A Python that has the same packages, and says of torch that it is older.
    cluster.hosts[2].ssh(
        f"mkdir -p {other}/torch-2.9.0.dist-info && "
        f"printf 'Metadata-Version: 2.1\\nName: torch\\nVersion: 2.9.0\\n' >{other}/torch-2.9.0.dist-info/METADATA && "
        f"echo 'PermitUserEnvironment yes' >>/etc/ssh/sshd_config && "
        f"echo PYTHONPATH={other} >/root/.ssh/environment && "
        "systemctl restart ssh"
    )
    try:
        message = refused("--nodes", "lwt1,lwt2,lwt3,lwt9")
    finally:
        cluster.hosts[2].ssh("rm /root/.ssh/environment")
        (cluster.hosts[1].root / "root/.ssh/away").rename(cluster.hosts[1].root / "root/.ssh/authorized_keys")
    assert "lwt2: auth: it refuses our key" in message
    assert "lwt3: torch: torch 2.9.0, the others have" in message or "others have 2.9.0" in message
    assert "lwt9: unreachable: the name lwt9 does not resolve" in message
    assert "authorized_keys" in message


def test_run_folder_that_is_not_shared(refused: Callable[..., str], tmp_path: Path) -> None:
    message = refused("--nodes", "lwt1,lwt2", "--set", f"run.dir={tmp_path}/runs")
    assert "it is not shared storage" in message
    assert "--set run.dir=PATH" in message


def test_rendezvous_port_that_is_taken_or_closed(
    call: Call, cluster: Cluster, refused: Callable[..., str], shared_config: Path
) -> None:
    cluster.hosts[0].ssh("systemd-run --unit=taken /usr/sbin/sshd -D -p 29512")
    message = refused("--nodes", "lwt1,lwt2", "--port", "29512")
    cluster.hosts[0].ssh("systemctl stop taken")
    assert "lwt1: port: port 29512 is taken" in message
    # A firewall in between: only packets to that port are lost. Nothing is started into it.
    block = "ip rule add ipproto tcp dport 29513 blackhole"
    cluster.hosts[1].ssh(block)
    try:
        nodes = ("--nodes", "lwt1,lwt2", "--port", "29513")
        assert "lwt2: rendezvous: cannot reach" in refused(*nodes)
        outcome = call("preflight", *nodes, "--config", str(shared_config), "--json", timeout_s=60)
    finally:
        cluster.hosts[1].ssh(block.replace("add", "del"))
    assert outcome.returncode == 3, outcome.stdout + outcome.stderr
    (fault,) = [finding for finding in json.loads(outcome.stdout)["findings"] if finding["level"] == "fail"]
    assert (fault["check"], fault["node"]) == ("rendezvous", "lwt2")
    assert "cannot reach" in fault["message"]


def test_a_host_behind_a_jump_host_and_a_hop_that_is_not_known(
    call: Call, cluster: Cluster, shared_config: Path, tmp_path: Path
) -> None:
    config, known = tmp_path / "ssh_config", tmp_path / "known_hosts"
    behind = cluster.ssh_config.read_text().replace("Host lwt2\n", "Host behind\n  ProxyJump lwt1\n")
    config.write_text(behind.replace(str(cluster.known_hosts), str(known)))
    known.write_text(cluster.known_hosts.read_text())
    arguments = ("--nodes", "behind,lwt3", "--config", str(shared_config), "--ssh-config", str(config), "--json")
    outcome = call("preflight", *arguments, timeout_s=60)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    answers = {f["node"]: f["message"] for f in json.loads(outcome.stdout)["findings"] if f["check"] == "reachable"}
    assert answers == {"behind": "lwt2", "lwt3": "lwt3"}

    known.write_text("".join(line + "\n" for line in known.read_text().splitlines() if not line.startswith("lwt1")))
    outcome = call("preflight", *arguments, timeout_s=60)
    assert outcome.returncode == 3
    (fault,) = [finding for finding in json.loads(outcome.stdout)["findings"] if finding["level"] == "fail"]
    assert (fault["check"], fault["node"]) == ("host key", "behind")
    assert "is not known" in fault["message"]
