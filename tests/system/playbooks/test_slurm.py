"""Slurm on real hosts: jobs run over both nodes, with GPUs from facts; a change drains nobody, an upgrade one node."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.system.hosts.cluster import Host
from tests.system.playbooks.bare import BareCluster
from tests.system.playbooks.dummy_packages import Package, publish
from tests.system.playbooks.mirror import source
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


def test_slurm_from_bare_hosts_to_jobs(own: BareCluster, play: Play) -> None:  # noqa: F811
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


# Notes what Slurm says of its node once the drain has begun, stays a little, and notes under which boot it has ended.
JOB = """#!/bin/sh
until scontrol show node NODE --oneliner > /var/tmp/during; grep -q DRAIN /var/tmp/during; do sleep 0.2; done
sleep 2
cat /proc/sys/kernel/random/boot_id > /var/tmp/job-ended
"""
BOOT_ID = "/proc/sys/kernel/random/boot_id"
KERNELS = ("6.1.140-1", "6.1.155-1")


def offer_kernels(node: Host, folder: Path) -> None:
    """Two versions of a kernel package in a repository on the node; the older one is installed and held."""
    kernels, name = folder / "kernels", "linux-image-amd64"
    publish(kernels, [Package(name, version) for version in KERNELS], kernels / "key.asc")
    shutil.copytree(kernels, node.root / "opt/kernels")
    (node.root / "etc/apt/sources.list.d/kernels.sources").write_text(source(Path("/opt/kernels")))
    node.ssh(f"apt-get -qq update && apt-get -qq install {name}={KERNELS[0]} && apt-mark hold {name}")


def submit(head: Host, node: Host, script: str, *options: str) -> str:
    """Hands a batch script for one node to Slurm. Returns the job's number."""
    batch = f"sbatch --parsable -w {node.name} -D / -o /dev/null {' '.join(options)}"
    return head.ssh(f"{batch} <<'END'\n{script}END").stdout.strip()


def reach(head: Host, job: str, state: str, timeout_s: float = 40) -> str:
    """Waits until a job has a state. Returns what Slurm says of it."""
    deadline = time.monotonic() + timeout_s
    while f"JobState={state} " not in (said := head.ssh(f"scontrol show job {job} --oneliner").stdout):
        assert time.monotonic() < deadline, said
        time.sleep(0.3)
    return said


def test_an_upgrade_drains_a_node_waits_for_its_job_and_gives_it_back(
    own: BareCluster,  # noqa: F811
    play: Play,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Follows the test above: the controller says that the node is drained and back."""
    head, node = own.hosts[0], own.hosts[2]
    offer_kernels(node, tmp_path)
    boot = node.ssh(f"cat {BOOT_ID}").stdout
    job = submit(head, node, JOB.replace("NODE", node.name))
    after = submit(head, node, f"#!/bin/sh\ncat {BOOT_ID} > /var/tmp/next-ran\n", f"--dependency=afterany:{job}")
    reach(head, job, "RUNNING")
    upgrade = {"upgrade_what": "kernel", "nvidia_upgrade_poll_s": 1}
    outcome = play("upgrade.yml", "--limit", f"{node.name},localhost", **upgrade)
    assert outcome.returncode == 0, outcome.output
    assert "Reason=loopworks: kernel upgrade" in node.ssh("cat /var/tmp/during").stdout
    assert "Restarts=0" in reach(head, job, "COMPLETED")
    reach(head, after, "COMPLETED")
    idle(head, 2)
    assert node.ssh("dpkg-query -W -f '${Version}' linux-image-amd64").stdout == KERNELS[1]
    ended, ran, now = (node.ssh(f"cat {path}").stdout for path in ("/var/tmp/job-ended", "/var/tmp/next-ran", BOOT_ID))
    assert ended == boot != ran == now, "the job ended, then the node rebooted, then Slurm gave it the next job"
    assert "Reason=" not in head.ssh(f"scontrol show node {node.name} --oneliner").stdout


def test_gpus_come_from_facts(own: BareCluster, play: Play) -> None:  # noqa: F811
    """Follows the tests above."""
    head, *nodes = own.hosts
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
