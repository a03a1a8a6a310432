"""Bare hosts: nobody but an administrator with sudo, no names of each other, packages from the mirror only."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

from tests.system.hosts.cluster import Cluster, Host
from tests.system.playbooks.ansible import Access, inventory
from tests.system.playbooks.mirror import source

ADMIN = "admin"
KEPT_CODE = Path(__file__).with_name("kept_code.py")


class BareHost(Host):
    """A host as it comes from the installer."""

    cluster: BareCluster

    def create(self) -> None:
        """Makes the host; the administrator's key is all that it knows of us."""
        super().create()
        chroot = ["chroot", str(self.root), "useradd", "--create-home", "--shell", "/bin/bash", ADMIN]
        subprocess.run(chroot, check=True, capture_output=True, timeout=20)
        (self.root / "root/.ssh/authorized_keys").rename(self.root / "home/admin/.authorized_keys")
        (self.root / "etc/sudoers.d/admin").write_text(f"{ADMIN} ALL=(ALL) NOPASSWD: ALL\n")
        (self.root / "etc/ssh/sshd_config.d/10-tests.conf").write_text("UseDNS no\n")
        ssh = self.root / "home/admin/.ssh"
        ssh.mkdir(mode=0o700)
        (self.root / "home/admin/.authorized_keys").rename(ssh / "authorized_keys")
        own = ["chroot", str(self.root), "chown", "-R", f"{ADMIN}:", f"/home/{ADMIN}"]
        subprocess.run(own, check=True, capture_output=True, timeout=20)
        for entry in [self.root / "etc/apt/sources.list", *(self.root / "etc/apt/sources.list.d").glob("*")]:
            entry.unlink(missing_ok=True)
        for hook in (self.root / "etc").glob("python3.*/sitecustomize.py"):
            hook.write_text(KEPT_CODE.read_text())
        for number, folder in enumerate(self.cluster.mirrors):
            (self.root / f"etc/apt/sources.list.d/mirror{number}.sources").write_text(source(folder))

    def ssh(self, command: str, *, check: bool = True, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
        """Runs a shell command on the host as root, by way of the administrator."""
        return super().ssh(f"sudo sh -c {shlex.quote(command)}", check=check, timeout_s=timeout_s)


class BareCluster(Cluster):
    """N bare hosts. `mirrors` are folders that apt installs from."""

    host_class = BareHost

    def __init__(self, *arguments: Any, mirrors: list[Path], read_only: list[Path], **keywords: Any) -> None:
        self.mirrors = mirrors
        super().__init__(*arguments, read_only=[*mirrors, *read_only], **keywords)

    def hosts_file(self) -> str:
        """Returns /etc/hosts as an installer leaves it: without the others."""
        return "127.0.0.1 localhost\n"

    def ssh_section(self, host: Host) -> str:
        return super().ssh_section(host).replace("User root", f"User {ADMIN}")

    def inventory(self, groups: dict[str, list[Host]], variables: dict[str, object]) -> str:
        """Returns an inventory of the groups, with these variables for all."""
        return inventory(groups, variables, Access(ADMIN, self.key, self.known_hosts))
