"""The disk, kernel and initial RAM disk that all test machines start from: built once, kept outside the checkout."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.system.hosts.tree import BUILD_TIMEOUT_S, cache_directory, debian, kept

# A kernel and what it needs to come up, sshd and Python for Ansible, and what the roles under test install: machines
# need no network of the outside.
PACKAGES = """linux-image-cloud-amd64 initramfs-tools udev kmod systemd systemd-sysv dbus libpam-systemd openssh-server
    python3 python3-apt sudo iproute2 iputils-ping procps netbase ca-certificates e2fsprogs
    curl gnupg numactl openssh-client pciutils unattended-upgrades
    nfs-kernel-server nfs-common mdadm nftables chrony rsync"""
MASKED = ("apt-daily.timer", "apt-daily-upgrade.timer", "systemd-timesyncd.service", "e2scrub_all.timer")
DISK = "3G"
VERSION = "2"
SSHD = "PermitRootLogin prohibit-password\nUseDNS no\n"


@dataclass(frozen=True)
class Image:
    """Where the parts lie."""

    disk: Path
    kernel: Path
    initrd: Path


def image() -> Image:
    """Returns the image, building it when it is not there (about three minutes)."""
    ready = kept(cache_directory().parent / "vm" / f"image-{VERSION}", _build)
    return Image(ready / "disk.img", ready / "vmlinuz", ready / "initrd")


def _build(folder: Path) -> None:
    for old in folder.parent.glob("image-*"):
        shutil.rmtree(old)
    folder.mkdir()
    tree = folder / "tree"
    debian(tree, ",".join(PACKAGES.split()), MASKED, SSHD)
    _settle(tree)
    shutil.copy(next((tree / "boot").glob("vmlinuz-*")), folder / "vmlinuz")
    shutil.copy(next((tree / "boot").glob("initrd.img-*")), folder / "initrd")
    subprocess.run(
        ["mke2fs", "-q", "-t", "ext4", "-d", str(tree), str(folder / "disk.img"), DISK],
        check=True,
        capture_output=True,
        timeout=BUILD_TIMEOUT_S,
    )
    shutil.rmtree(tree)


def _settle(tree: Path) -> None:
    """What a test machine has that a bare one has not: a network without questions, root by key."""
    wants = tree / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "systemd-networkd.service").symlink_to("/lib/systemd/system/systemd-networkd.service")
    # The roles are to switch these on.
    for unit in ("chrony", "nfs-server", "nftables"):
        for link in (tree / "etc/systemd/system").rglob(f"{unit}.service"):
            link.unlink()
    # All is there: a role that asks for a package finds it, and one that asks for lists gets none.
    for entry in (tree / "etc/apt/sources.list", *(tree / "etc/apt/sources.list.d").glob("*")):
        entry.unlink(missing_ok=True)
    (tree / "etc/fstab").write_text("/dev/vda / ext4 defaults,noatime 0 1\n")
