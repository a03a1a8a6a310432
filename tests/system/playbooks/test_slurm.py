"""Slurm on real hosts: jobs run over both nodes, with GPUs from facts; a change takes effect and drains nobody."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.system.hosts.cluster import Host
from tests.system.playbooks.bare import BareCluster
from tests.system.playbooks.own_hosts import Play

pytest_plugins = ("tests.system.playbooks.own_hosts",)
pytestmark = pytest.mark.system
# A container sees the control groups of its host's kernel, in whichever version these are.
CONTAINER: dict[str, Any] = {
    "slurm_enabled": True,
    "slurm_cgroups": False,
    "slurm_cgroup_settings": {"CgroupPlugin": "cgroup/v1", "CgroupAutomount": "no"},
}
ROOT = "/opt/pretended"


def idle(head: Host, count: int, timeout_s: float = 40) -> None:
    """Waits until so many nodes are idle."""
    deadline = time.monotonic() + timeout_s
    while (states := head.ssh("sinfo -h -N -o %T", check=False).stdout.split()) != ["idle"] * count:
        assert time.monotonic() < deadline, head.ssh("sinfo -N -l; tail -5 /var/log/slurm/slurmctld.log").stdout
        assert states is not None
        time.sleep(0.3)


def pretend_gpus(host: Host, count: int) -> None:
    """PCI devices under another root, and device files: copies of the null device."""
    for number in range(count):
        folder = f"{ROOT}/sys/bus/pci/devices/0000:00:1{number}.0"
        files = "; ".join(f"echo {value} > {folder}/{name}" for name, value in GPU.items())
        host.ssh(f"mkdir -p {folder}; {files}; mknod /dev/nvidia{number} c 1 3")


GPU = {"vendor": "0x10de", "device": "0x2330", "class": "0x030200"}


def test_slurm_from_bare_hosts_to_jobs_with_gpus(own: BareCluster, play: Play) -> None:  # noqa: F811
    head, *nodes = own.hosts
    off = play("slurm.yml")
    assert (off.returncode, off.changed()) == (0, 0), off.output
    check = play("slurm.yml", "--check", "--diff", **CONTAINER)
    assert check.returncode == 0, check.output
    applied = play("slurm.yml", **CONTAINER)
    assert applied.returncode == 0, applied.output
    idle(head, 2)
    ran = head.ssh("timeout 20 srun -N2 hostname").stdout.split()
    assert sorted(ran) == [node.name for node in nodes]
    sums = {
        host.ssh("sha256sum < /etc/slurm/slurm.conf; sha256sum < /etc/munge/munge.key").stdout for host in own.hosts
    }
    assert len(sums) == 1
    assert nodes[0].ssh("stat -c '%U %a' /etc/munge/munge.key").stdout.split() == ["munge", "400"]
    again = play("slurm.yml", **CONTAINER)
    assert (again.returncode, again.changed()) == (0, 0), again.changes()

    for node in nodes:
        pretend_gpus(node, 2)
    changed = {**CONTAINER, "loopworks_facts_root": ROOT, "slurm_kill_wait_s": 61}
    more = play("slurm.yml", **changed)
    assert more.returncode == 0, more.output
    idle(head, 2)
    assert "= 61 sec" in head.ssh("scontrol show config | grep KillWait").stdout
    job = "timeout 20 srun -N2 --gpus-per-node=2 sh -c 'echo $CUDA_VISIBLE_DEVICES'"
    assert head.ssh(job).stdout.split() == ["0,1", "0,1"]
    some = play("slurm.yml", "--limit", nodes[0].name, **changed)
    assert (some.returncode, some.changed()) == (0, 0), some.changes()


def test_the_node_daemon_waits_for_its_gpus(own: BareCluster) -> None:  # noqa: F811
    """Follows the test above: at boot the device files may come later than slurmd."""
    node = own.hosts[1]
    node.ssh("systemctl stop slurmd; mv /dev/nvidia1 /dev/later; systemctl start --no-block slurmd")
    time.sleep(2)
    assert node.ssh("systemctl is-active slurmd", check=False).stdout.strip() == "activating"
    node.ssh("mv /dev/later /dev/nvidia1")
    deadline = time.monotonic() + 20
    while node.ssh("systemctl is-active slurmd", check=False).stdout.strip() != "active":
        assert time.monotonic() < deadline
        time.sleep(0.3)
