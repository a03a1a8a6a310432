"""Runs playbooks as a user does, and reads what they say at the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from tests.system.conftest import CHECKOUT

RECAP = re.compile(r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What a playbook did. `hosts` has ok, changed, unreachable and failed of each host."""

    returncode: int
    output: str
    hosts: dict[str, tuple[int, int, int, int]]

    def changed(self) -> int:
        """Tasks that changed something, over all hosts."""
        return sum(counts[1] for counts in self.hosts.values())

    def changes(self) -> str:
        """The tasks that changed something, for the message of a failed test."""
        tasks = re.split(r"^TASK ", self.output, flags=re.MULTILINE)
        return "\n".join(task for task in tasks if re.search(r"^changed:", task, re.MULTILINE))[-4000:]


@dataclass(frozen=True)
class Access:
    """Who comes in, with which key, and which host keys are known."""

    user: str
    key: Path
    known_hosts: Path


class Reachable(Protocol):
    """A host of an inventory."""

    name: str
    address: str


def inventory(groups: Mapping[str, Sequence[Reachable]], variables: Mapping[str, object], access: Access) -> str:
    """Returns an inventory in YAML: how Ansible reaches the hosts, with strict host keys, and the variables."""
    common = f"-o UserKnownHostsFile={access.known_hosts} -o StrictHostKeyChecking=yes -o IdentitiesOnly=yes"
    reach = {
        "ansible_user": access.user,
        "ansible_ssh_private_key_file": str(access.key),
        "ansible_ssh_common_args": common,
    }
    children = {
        group: {"hosts": {host.name: {"ansible_host": host.address} for host in hosts}}
        for group, hosts in groups.items()
    }
    return yaml.safe_dump({"all": {"vars": {**reach, **variables}, "children": children}}, sort_keys=False)


class Ansible:
    """ansible-playbook over one inventory, with a fact cache of its own."""

    def __init__(self, folder: Path, inventory: str) -> None:
        self.folder = folder
        self.inventory = folder / "hosts.yml"
        self.inventory.write_text(inventory)

    def play(self, playbook: str, *arguments: str, timeout_s: float = 600) -> Outcome:
        """Runs playbooks/PLAYBOOK from the folder playbooks."""
        # A short folder for the sockets: the kernel takes 107 letters.
        environment = {
            **os.environ,
            "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(self.folder / "facts"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": f"/tmp/lwcp-{os.getpid()}",
            "ANSIBLE_NOCOLOR": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        environment.pop("ANSIBLE_CONFIG", None)
        done = subprocess.run(
            [Path(sys.executable).parent / "ansible-playbook", "-i", self.inventory, playbook, *arguments],
            cwd=CHECKOUT / "playbooks",
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        output = done.stdout + done.stderr
        (self.folder / f"{Path(playbook).stem}.log").write_text(output)
        hosts = {name: tuple(map(int, counts)) for name, *counts in RECAP.findall(done.stdout)}
        return Outcome(done.returncode, output, hosts)  # type: ignore[arg-type]
