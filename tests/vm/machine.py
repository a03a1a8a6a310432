"""Whole machines under QEMU's software emulation: a kernel of their own, on a private bridge, removed at the end."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.vm.image import Image

ADMIN = "admin"
MEMORY_MIB = 1024
BOOT_TIMEOUT_S = 400
BLANK_DISK_BYTES = 64 * 2**20
NETWORK_UNIT = "[Match]\nName=eth0\n[Network]\nAddress={address}/24\n"
SUDO = "admin ALL=(ALL) NOPASSWD: ALL\n"


class Machine:
    """One machine: `boot`, `wait`, `ssh`, `reboot`."""

    def __init__(self, group: Machines, index: int, disks: dict[str, int]) -> None:
        self.group = group
        self.index = index
        self.name = f"{group.name}{index}"
        self.address = f"{group.network}.{10 + index}"
        self.folder = group.state / self.name
        self.tap = f"t{self.name}"
        # Extra disks by serial number, with their size in bytes.
        self.disks = disks
        self._qemu: subprocess.Popen[bytes] | None = None

    def create(self, image: Image) -> None:
        """Makes the disks and the network device."""
        self.folder.mkdir(parents=True)
        disk = self.folder / "disk.img"
        _run("cp", "--sparse=always", str(image.disk), str(disk))
        for serial, size in self.disks.items():
            with (self.folder / f"{serial}.img").open("wb") as file:
                file.truncate(size)
        root = self.folder / "root"
        root.mkdir()
        _run("mount", "-o", "loop", str(disk), str(root))
        try:
            self._settle(root)
        finally:
            _run("umount", str(root))
        _run("ip", "tuntap", "add", self.tap, "mode", "tap")
        _run("ip", "link", "set", self.tap, "master", self.group.bridge, "up")

    def _settle(self, root: Path) -> None:
        """Name, address, host key and the administrator: what an installer asks for."""
        (root / "etc/hostname").write_text(self.name + "\n")
        (root / "etc/machine-id").write_text(uuid.uuid4().hex + "\n")
        (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
        unit = NETWORK_UNIT.format(address=self.address)
        (root / "etc/systemd/network/10-tests.network").write_text(unit)
        key = root / "etc/ssh/ssh_host_ed25519_key"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"root@{self.name}", "-f", str(key))
        public = " ".join(key.with_suffix(".pub").read_text().split()[:2])
        with self.group.known_hosts.open("a") as file:
            file.write(f"{self.name},{self.address} {public}\n")
        _run("chroot", str(root), "useradd", "--create-home", "--shell", "/bin/bash", ADMIN)
        (root / "etc/sudoers.d/admin").write_text(SUDO)
        ssh = root / "home/admin/.ssh"
        ssh.mkdir(mode=0o700)
        (ssh / "authorized_keys").write_text(self.group.key.with_suffix(".pub").read_text())
        _run("chroot", str(root), "chown", "-R", f"{ADMIN}:", f"/home/{ADMIN}")

    def boot(self, image: Image) -> None:
        """Starts the machine; `wait` tells when it answers."""
        command = ["qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"]
        command += ["-m", str(MEMORY_MIB), "-display", "none", "-monitor", "none"]
        command += ["-serial", f"file:{self.folder}/console.log"]
        command += ["-kernel", str(image.kernel), "-initrd", str(image.initrd)]
        command += ["-append", "root=/dev/vda rw console=ttyS0 net.ifnames=0"]
        # By -device all: in this order the kernel names them, the root disk first.
        for serial in ("disk", *self.disks):
            command += ["-drive", f"file={self.folder}/{serial}.img,if=none,id={serial},format=raw,cache=unsafe"]
            command += ["-device", f"virtio-blk-pci,drive={serial},serial={serial}"]
        command += ["-netdev", f"tap,id=net,ifname={self.tap},script=no,downscript=no"]
        command += ["-device", f"virtio-net-pci,netdev=net,mac=52:54:00:4c:57:{self.index:02x}"]
        command += ["-device", "virtio-rng-pci"]
        with (self.folder / "qemu.log").open("ab") as log:
            self._qemu = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Waits until sshd runs a command."""
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self.ssh("true", check=False).returncode == 0:
                    return
            if time.monotonic() > deadline or self._qemu is None or self._qemu.poll() is not None:
                console = (self.folder / "console.log").read_text(errors="replace")
                raise TimeoutError(f"{self.name} does not answer: {console[-1500:]}")
            time.sleep(0.5)

    def ssh(
        self, command: str, *, check: bool = True, user: str = "root", timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Runs a shell command as root, or as another user in a login of its own, by way of the administrator."""
        inner = (
            f"sudo -i -u {user} sh -c {shlex.quote(command)}"
            if user != "root"
            else f"sudo sh -c {shlex.quote(command)}"
        )
        argv = ["ssh", "-F", "/dev/null", "-i", str(self.group.key), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
        argv += ["-o", "IdentitiesOnly=yes", "-o", f"UserKnownHostsFile={self.group.known_hosts}"]
        argv += ["-o", "StrictHostKeyChecking=yes", f"{ADMIN}@{self.address}", inner]
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=check)

    def output(self, command: str, *, user: str = "root", timeout_s: float = 60) -> str:
        """Returns what a command prints."""
        return self.ssh(command, user=user, timeout_s=timeout_s).stdout.strip()

    def reboot(self) -> None:
        """Reboots the machine from inside and waits until it answers with another boot id."""
        before = self.output("cat /proc/sys/kernel/random/boot_id")
        self.ssh("systemctl reboot", check=False)
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = self.ssh("cat /proc/sys/kernel/random/boot_id", check=False)
                if done.returncode == 0 and done.stdout.strip() != before:
                    return
            time.sleep(0.5)
        raise TimeoutError(f"{self.name} does not come back")

    def remove(self) -> None:
        """Ends the machine and takes its network device away."""
        if self._qemu is not None:
            self._qemu.kill()
            self._qemu.wait(20)
        _run("umount", "-l", str(self.folder / "root"), check=False)
        _run("ip", "link", "del", self.tap, check=False)


class Machines:
    """Machines on one bridge, with known host keys."""

    def __init__(self, state: Path, *, name: str, network: str, disks: list[dict[str, int]]) -> None:
        self.state, self.name, self.network = state, name, network
        self.bridge = f"{name}br"
        self.key = state / "id_ed25519"
        self.known_hosts = state / "known_hosts"
        self.all = [Machine(self, index, extra) for index, extra in enumerate(disks, 1)]

    def up(self, image: Image) -> None:
        """Creates and boots all machines and waits until they answer."""
        self.state.mkdir(parents=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
        for link in (self.bridge, *(machine.tap for machine in self.all)):
            _run("ip", "link", "del", link, check=False)  # what tests that were killed have left
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.network}.1/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        for machine in self.all:
            machine.create(image)
            machine.boot(image)
        for machine in self.all:
            machine.wait()

    def down(self) -> None:
        """Removes everything; safe to call after a failure half-way."""
        for machine in self.all:
            machine.remove()
        _run("ip", "link", "del", self.bridge, check=False)
        _run("rm", "-rf", str(self.state), check=False)


@contextlib.contextmanager
def running(machines: Machines, image: Image) -> Iterator[Machines]:
    """Inside the block the machines are up; afterwards nothing of them is left."""
    try:
        machines.up(image)
        yield machines
    finally:
        machines.down()


def _run(*command: str, check: bool = True) -> None:
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if check and outcome.returncode:
        raise RuntimeError(f"{' '.join(command)}: {outcome.stderr.strip()}")
