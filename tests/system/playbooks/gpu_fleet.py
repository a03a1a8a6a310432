"""A host of each kind of GPU, the signed repository of dummy packages, and Ansible over them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.system.hosts.cluster import Host
from tests.system.playbooks import gpu_packages
from tests.system.playbooks.ansible import Ansible, Outcome

TOOLS = ("systemd-nspawn", "mmdebstrap", "ip", "ssh-keygen", "dpkg-scanpackages", "dpkg-deb", "gpg")
NETWORK = "10.92.0"
OLD, NEW = "580.126.09", "580.173.02"
MARK = "/var/lib/loopworks/drained"
WITH_GPU = tuple(kind for kind in gpu_packages.GPUS if kind != "none")


@dataclass
class Fleet:
    """One host of each kind, and Ansible over them."""

    hosts: dict[str, Host]
    ansible: Ansible
    repository: Path

    def play(self, playbook: str, *arguments: str, kinds: tuple[str, ...] = tuple(gpu_packages.GPUS)) -> Outcome:
        """Runs a playbook on the hosts of these kinds."""
        return self.ansible.play(
            playbook, "--limit", ",".join(["localhost", *(self.hosts[k].name for k in kinds)]), *arguments
        )

    def versions(self, kind: str) -> dict[str, str]:
        """Installed packages of the driver and of DCGM, each with its version."""
        text = self.run(kind, "dpkg-query -W -f '${db:Status-Abbrev} ${Package} ${Version}\\n'")
        rows = [line.split() for line in text.splitlines()]
        ours = re.compile("nvidia|cuda|datacenter")
        return {row[1]: row[2] for row in rows if row[0][1:2] == "i" and ours.search(row[1])}

    def run(self, kind: str, command: str) -> str:
        """Standard output of a command on a host."""
        return self.hosts[kind].ssh(command).stdout

    def loaded(self, kind: str) -> str:
        """The version of the module in the kernel."""
        return self.run(kind, f"cat {gpu_packages.SYSFS}/sys/module/nvidia/version || true").strip()

    def boot(self, kind: str) -> str:
        """Another text after each boot."""
        return self.run(kind, "cat /proc/sys/kernel/random/boot_id")

    def active(self, kind: str, *units: str) -> list[str]:
        """The states of units."""
        return self.hosts[kind].ssh(f"systemctl is-active {' '.join(units)}", check=False).stdout.split()
