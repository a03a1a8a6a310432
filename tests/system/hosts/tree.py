"""The root tree that all test hosts share: built once with mmdebstrap, kept in a cache outside the checkout."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Short: systemd, sshd, Open MPI and what the tests look at. Python comes with a bind mount from this machine.
PACKAGES = "systemd,systemd-sysv,dbus,openssh-server,openssh-client,iproute2,procps,netbase,openmpi-bin"
# Nothing in a container owns consoles, clocks or package updates.
MASKED = ("console-getty.service", "getty@tty1.service", "systemd-timesyncd.service", "apt-daily.timer")
SSHD = "PasswordAuthentication no\nPermitRootLogin prohibit-password\nUseDNS no\nMaxStartups 100\n"
VERSION = "2"
BUILD_TIMEOUT_S = 900


def cache_directory() -> Path:
    """Returns where the tree is kept between test runs."""
    return Path(os.environ.get("LOOPWORKS_CACHE", "~/.cache/loopworks")).expanduser() / "hosts"


def root_tree(name: str = "tree", packages: str = PACKAGES) -> Path:
    """Returns a tree, building it when it is not there (about a minute)."""
    # An environment made with the system's Python needs that one on the hosts; others come whole.
    variant, python = ("-python", ",python3") if uses_system_python() else ("", "")
    return kept(
        cache_directory() / f"{name}-{VERSION}{variant}", lambda fresh: debian(fresh, packages + python, MASKED, SSHD)
    )


def kept(place: Path, build: Callable[[Path], None]) -> Path:
    """Returns `place`, which `build` makes when it is not there. Who comes meanwhile waits."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            fresh = place.with_name("fresh")
            shutil.rmtree(fresh, ignore_errors=True)
            build(fresh)
            fresh.rename(place)
    return place


def uses_system_python() -> bool:
    """True when this Python is Debian's, and not one below a folder of its own."""
    return Path(sys.base_prefix) == Path("/usr")


def debian(tree: Path, packages: str, masked: tuple[str, ...], sshd: str) -> None:
    """Installs Debian with `packages` (comma-separated) into `tree`, as an image: nobody's keys, names and addresses.

    The units `masked` never start, and `sshd` are settings of the SSH daemon.
    """
    command = ["mmdebstrap", "--variant=minbase", f"--include={packages}", "--aptopt=Acquire::Languages none"]
    command += ["--aptopt=Acquire::Check-Valid-Until false"]
    command += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "doc", "locale")]
    # This machine's own sources: what CI installs from.
    command += [suite(), str(tree), *sources()]
    subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
    for unit in masked:
        (tree / "etc/systemd/system" / unit).symlink_to("/dev/null")
    (tree / "etc/ssh/sshd_config.d/10-tests.conf").write_text(sshd)
    for key in (tree / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    for name in ("etc/machine-id", "etc/hostname", "etc/resolv.conf"):
        (tree / name).unlink(missing_ok=True)


def suite() -> str:
    """Returns the code name of this machine's Debian."""
    facts = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return facts["VERSION_CODENAME"].strip('"')


def sources() -> list[str]:
    """Returns the files that this machine's own apt reads."""
    places = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    return [
        str(path) for path in places if path.suffix in (".list", ".sources") and path.exists() and path.stat().st_size
    ]
