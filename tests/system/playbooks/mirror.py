"""A Debian mirror of what the playbooks install, as a folder that hosts see read-only: no host needs a network."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from tests.system.hosts.tree import cache_directory, kept, root_tree

# What a cloud image or a fresh installation has, and not more.
BARE = (
    "systemd,systemd-sysv,dbus,libpam-systemd,openssh-server,openssh-client,python3,python3-apt,sudo,iproute2,"
    "ca-certificates,procps,netbase,kmod,udev,iputils-ping"
)
# What the roles install on these hosts; apt adds what these need.
PACKAGES = (
    "chrony",
    "numactl",
    "pciutils",
    "rsync",
    "nftables",
    "rdma-core",
    "ibverbs-utils",
    "ibverbs-providers",
    "infiniband-diags",
    "mdadm",
    "python3-debian",
    "nfs-common",
    "nfs-kernel-server",
    "python3-venv",
    "redis-server",
    "redis-tools",
    "prometheus",
    "prometheus-alertmanager",
    "prometheus-node-exporter",
    "nginx-light",
    "munge",
    "slurmctld",
    "slurmd",
    "slurm-client",
    "unattended-upgrades",
    "gnupg",
    "curl",
)


def bare_tree() -> Path:
    """Returns the root tree of a bare host, building it when it is not there."""
    return root_tree("bare", BARE)


def mirror(packages: tuple[str, ...] = PACKAGES) -> Path:
    """Returns a folder with `packages`, all that they need beyond a bare host, and an index. Kept between test runs."""
    tree = bare_tree()
    status = tree / "var/lib/dpkg/status"
    key = hashlib.sha256("\n".join([*packages, status.read_text()]).encode()).hexdigest()[:12]

    def build(fresh: Path) -> None:
        for old in cache_directory().glob("mirror-*"):
            shutil.rmtree(old, ignore_errors=True)
        _download(fresh, status, packages)
        index(fresh)

    return kept(cache_directory() / f"mirror-{key}", build)


def index(folder: Path) -> None:
    """Writes Packages, the list that apt reads, of the .deb files in the folder."""
    listed = subprocess.run(
        ["dpkg-scanpackages", "--multiversion", "."], cwd=folder, capture_output=True, check=True, timeout=120
    )
    (folder / "Packages").write_bytes(listed.stdout)


def source(folder: Path) -> str:
    """Returns the sources entry of a folder that the host sees under the same path."""
    return f"Types: deb\nURIs: file:{folder}\nSuites: ./\nTrusted: yes\n"


def _download(folder: Path, status: Path, packages: tuple[str, ...]) -> None:
    """This machine's apt resolves for the bare host: by its list of installed packages."""
    (folder / "partial").mkdir(parents=True)
    options = {
        "Dir::State::status": status,
        "Dir::Cache::archives": folder,
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "APT::Install-Recommends": "0",
        "APT::Sandbox::User": "root",
    }
    command = ["apt-get", "-qq", "--yes", "--download-only"]
    command += [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    subprocess.run(["apt-get", "-qq", "update"], check=True, capture_output=True, timeout=300)
    done = subprocess.run([*command, "install", *packages], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"apt-get cannot fetch what the playbooks install: {done.stderr[-2000:]}")
    shutil.rmtree(folder / "partial")
    (folder / "lock").unlink(missing_ok=True)
