"""The root tree that all test hosts share: built once with mmdebstrap, kept in a cache outside the checkout."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

# Short: systemd, sshd, Open MPI and what the tests look at. Python comes with a bind mount from this machine.
PACKAGES = "systemd,systemd-sysv,dbus,openssh-server,openssh-client,iproute2,procps,netbase,openmpi-bin"
# Nothing in a container owns consoles, clocks or package updates.
MASKED = ("console-getty.service", "getty@tty1.service", "systemd-timesyncd.service", "apt-daily.timer")
VERSION = "2"


def cache_directory() -> Path:
    """Returns where the tree is kept between test runs."""
    return Path(os.environ.get("LOOPWORKS_CACHE", "~/.cache/loopworks")).expanduser() / "hosts"


def root_tree(name: str = "tree", packages: str = PACKAGES) -> Path:
    """Returns a tree, building it when it is not there (about a minute)."""
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    tree = cache / f"{name}-{VERSION}{'-python' if uses_system_python() else ''}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.is_dir():
            fresh = cache / "fresh"
            shutil.rmtree(fresh, ignore_errors=True)
            _build(fresh, packages)
            fresh.rename(tree)
    return tree


def uses_system_python() -> bool:
    """True when this Python is Debian's, and not one below a folder of its own."""
    return Path(sys.base_prefix) == Path("/usr")


def _build(tree: Path, packages: str) -> None:
    # An environment made with the system's Python needs that one on the hosts; others come whole.
    packages += ",python3" if uses_system_python() else ""
    command = ["mmdebstrap", "--variant=minbase", f"--include={packages}", "--aptopt=Acquire::Languages none"]
    command += ["--aptopt=Acquire::Check-Valid-Until false"]
    command += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "doc", "locale")]
    # This machine's own sources: what CI installs from.
    command += [suite(), str(tree), *sources()]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    for unit in MASKED:
        (tree / "etc/systemd/system" / unit).symlink_to("/dev/null")
    settings = "PasswordAuthentication no\nPermitRootLogin prohibit-password\nUseDNS no\nMaxStartups 100\n"
    (tree / "etc/ssh/sshd_config.d/10-tests.conf").write_text(settings)
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
