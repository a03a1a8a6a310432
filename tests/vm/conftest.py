"""Fixtures: two machines, a head that serves and a node, and Ansible over them. `make test-vm` runs this suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.hosts.needs import needs_root_and
from tests.system.playbooks.ansible import Access, Ansible, inventory
from tests.vm.image import image
from tests.vm.machine import ADMIN, BLANK_DISK_BYTES, Machines, running

TOOLS = ("qemu-system-x86_64", "mmdebstrap", "mke2fs", "ip", "ssh-keygen")
NETWORK = "10.85.0"
VOLUME = "vol-0123456789abcdef0"
# The head has the data disk of an AWS stack, the node has three local disks, of which one will carry something.
DISKS = [{VOLUME.replace("-", ""): BLANK_DISK_BYTES}, {"local1": BLANK_DISK_BYTES, "local2": BLANK_DISK_BYTES}]


@pytest.fixture(scope="session")
def machines() -> Iterator[Machines]:
    """lwv1 (head, serves) and lwv2 (node)."""
    needs_root_and(TOOLS)
    state = Path("/var/tmp") / f"loopworks-vm-{os.getpid()}"
    made = Machines(state, name="lwv", network=NETWORK, disks=DISKS)
    with running(made, image()) as group:
        yield group


@pytest.fixture(scope="session")
def ansible(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Ansible:
    """Ansible over both, with an inventory as a small private cluster would have it."""
    head, *nodes = machines.all
    variables: dict[str, Any] = {
        "ansible_become": True,
        "loopworks_cluster": "vm",
        "loopworks_cluster_cidr": f"{NETWORK}.0/24",
        "loopworks_allowed_cidrs": [f"{NETWORK}.0/24"],
        "loopworks_storage": {"kind": "nfs", "mount_point": "/shared", "id": VOLUME},
        "ssh_admin_keys": [f"{machines.key}.pub"],
        "storage_device": "/dev/sdf",
    }
    access = Access(ADMIN, machines.key, machines.known_hosts)
    groups = {"head": [head], "gpu_nodes": nodes}
    return Ansible(tmp_path_factory.mktemp("vm"), inventory(groups, variables, access))
