"""Fixtures: a host of each kind of GPU, and the old driver on all of them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.hosts.cluster import running
from tests.system.hosts.needs import needs_root_and
from tests.system.playbooks import gpu_packages
from tests.system.playbooks.ansible import Ansible
from tests.system.playbooks.bare import BareCluster
from tests.system.playbooks.efa_standin import EFA, Publisher, plug
from tests.system.playbooks.gpu_fleet import NETWORK, OLD, TOOLS, Fleet
from tests.system.playbooks.mirror import bare_tree, mirror


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    needs_root_and(TOOLS)
    state = Path("/var/tmp") / f"loopworks-gpu-{os.getpid()}"
    packages = Path("/var/tmp") / f"loopworks-gpu-packages-{os.getpid()}"
    repository = packages / "repository"
    try:
        fingerprint = gpu_packages.build(repository)
        # A copy: another session may renew the cached one.
        own_mirror = Path(shutil.copytree(mirror(), packages / "mirror"))
        kinds = list(gpu_packages.GPUS)
        cluster = BareCluster(
            state,
            bare_tree(),
            len(kinds),
            name="lwg",
            network=NETWORK,
            mirrors=[own_mirror],
            read_only=[repository],
            shared=[],
        )
        with running(cluster), contextlib.closing(Publisher(packages / "efa")) as publisher:
            hosts = dict(zip(kinds, cluster.hosts, strict=True))
            for kind, host in hosts.items():
                gpu_packages.sysfs(host.root, kind)
            plug(hosts["h200"], gpu_packages.SYSFS, EFA, 4)
            variables = {
                "loopworks_provider": f"{{{{ 'aws' if inventory_hostname == '{hosts['h200'].name}' else 'private' }}}}",
                "efa_installer_file": str(publisher.publish("1.51.0")),
                "efa_key_fingerprint": publisher.fingerprint,
                "loopworks_cluster_cidr": f"{NETWORK}.0/24",
                "loopworks_facts_root": gpu_packages.SYSFS,
                "nvidia_repo_url": f"file:{repository}/",
                "nvidia_repo_key": str(repository / "key.asc"),
                "nvidia_repo_key_fingerprints": [fingerprint],
                "nvidia_upgrade_poll_s": 1,
            }
            groups = {"head": [hosts["none"]], "gpu_nodes": list(hosts.values())}
            ansible = Ansible(tmp_path_factory.mktemp("gpu"), cluster.inventory(groups, variables))
            yield Fleet(hosts, ansible, repository)
    finally:
        shutil.rmtree(packages, ignore_errors=True)


@pytest.fixture(scope="session")
def installed(fleet: Fleet) -> Fleet:
    """All kinds with the old version, from bare; two of them with a past."""
    bare = fleet.play("nvidia.yml", "--check", "--diff", kinds=("a100-sxm", "none"))
    assert bare.returncode == 0, bare.output
    assert "Suites: /" in bare.output, "the difference is shown"
    assert not fleet.versions("a100-sxm"), "check mode installs nothing"
    # DCGM 3 and the key package, as an older set-up leaves them.
    past = "datacenter-gpu-manager_1%3a3.3.9_all.deb cuda-keyring_1.1-1_all.deb"
    fleet.run("a100-sxm", f"cd {fleet.repository} && dpkg -i {past}")
    assert fleet.active("a100-sxm", "nvidia-dcgm") == ["active"]
    # As a new node of AWS: nouveau holds the GPUs, and EFA's installer brings another kernel module.
    nouveau = fleet.hosts["h200"].root / gpu_packages.SYSFS.lstrip("/") / "sys/module/nouveau"
    nouveau.mkdir()
    # To the roles a machine until its next boot, with headers of its kernel and a tool that a container has no use for.
    tool = fleet.hosts["h200"].root / "usr/sbin/update-initramfs"
    tool.write_text('#!/bin/sh\necho "initramfs $@" >> /var/log/standin.log\n')
    tool.chmod(0o755)
    fleet.run("h200", "rm /run/systemd/container; mkdir -p /lib/modules/$(uname -r)/build")
    before = {kind: fleet.boot(kind) for kind in ("h200", "l40s")}
    done = fleet.play("site.yml", "--tags", "nvidia,efa", "-e", f"nvidia_version={OLD}")
    assert done.returncode == 0, done.output
    assert fleet.boot("h200") != before["h200"], "nouveau leaves by a reboot"
    assert done.output.count("TASK [loopworks : Note that a reboot is due]") == 2, "of nvidia and of efa"
    assert done.output.count("TASK [loopworks : Reboot, few at a time]") == 1, "one for both"
    assert fleet.run("h200", "cat /var/log/standin.log /var/log/efa-standin.log") == "initramfs -u\n-y\n"
    assert fleet.run("h200", "cat /etc/ld.so.conf.d/loopworks-efa.conf").startswith("/opt/amazon/ofi-nccl/lib/")
    assert not nouveau.exists()
    assert fleet.boot("l40s") == before["l40s"]
    return fleet
