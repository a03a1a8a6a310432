"""Brings up N hosts in network namespaces, injects faults, and removes everything again."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
BOOT_TIMEOUT_S = 60
# Every systemd takes about ten of these, and all hosts count as one user: with the usual 128 a dozen hosts do not boot.
INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_INSTANCES = 1024
# nspawn ends with 133 when the host reboots itself, and whoever started it has to start it again.
REBOOTING = 'while "$@"; [ $? -eq 133 ]; do :; done'


class Host:
    """One host: `up`, `kill`, `cut`, `mend`, `freeze`, `thaw`."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.cluster = cluster
        self.name = f"{cluster.name}{index}"
        self.address = f"{cluster.network}.{10 + index}"
        self.folder = cluster.state / self.name
        self.root = self.folder / "root"
        self._nspawn: subprocess.Popen[bytes] | None = None

    def create(self) -> None:
        """Makes the network namespace and the disk (an overlay over the tree)."""
        for name in ("upper", "work", "root"):
            (self.folder / name).mkdir(parents=True)
        layers = f"lowerdir={self.cluster.tree},upperdir={self.folder}/upper,workdir={self.folder}/work"
        _run("mount", "-t", "overlay", self.name, "-o", layers, str(self.root))
        _run("ip", "netns", "add", self.name)
        _run("ip", "link", "add", f"v{self.name}", "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _run("ip", "link", "set", f"v{self.name}", "master", self.cluster.bridge, "up")
        for command in ("link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up"):
            _run("ip", "-n", self.name, *command.split())
        _run("ip", "-n", self.name, "route", "add", "default", "via", f"{self.cluster.network}.1")
        self.new_host_key()
        ssh = self.root / "root/.ssh"
        ssh.mkdir(mode=0o700, exist_ok=True)
        (ssh / "authorized_keys").write_text(self.cluster.key.with_suffix(".pub").read_text())
        # All hosts share the cores of one machine: threads that wait must not spin (tests/conftest.py).
        (self.root / "etc/ssh/sshd_config.d/20-shared-cores.conf").write_text("SetEnv OMP_WAIT_POLICY=PASSIVE\n")
        (self.root / "etc/machine-id").write_text(secrets.token_hex(16) + "\n")
        (self.root / "etc/hostname").write_text(self.name + "\n")
        (self.root / "etc/hosts").write_text(self.cluster.hosts_file())

    def new_host_key(self) -> None:
        """Gives the host another host key (sshd reads it at its next start)."""
        path = self.root / "etc/ssh/ssh_host_ed25519_key"
        path.unlink(missing_ok=True)
        path.with_suffix(".pub").unlink(missing_ok=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"root@{self.name}", "-f", str(path))

    def public_key(self) -> str:
        """Returns type and key of the host key."""
        words = (self.root / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()
        return " ".join(words[:2])

    def boot(self) -> None:
        """Starts the host; `wait` tells when it answers."""
        command = ["systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", f"--machine={self.name}"]
        command += [f"--hostname={self.name}", f"--directory={self.root}", "--resolv-conf=off", "--timezone=off"]
        command += [f"--network-namespace-path=/run/netns/{self.name}", "--link-journal=no"]
        command += ["--kill-signal=SIGRTMIN+3", "--capability=CAP_NET_ADMIN,CAP_NET_RAW,CAP_SYS_NICE"]
        command += ["--suppress-sync=yes"]  # disks live as long as the tests: waiting for them proves nothing
        command += [f"--bind-ro={path}" for path in self.cluster.read_only]
        command += [f"--bind={path}" for path in self.cluster.shared]
        environment = {**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1", "SYSTEMD_NSPAWN_LOCK": "0"}
        environment["SYSTEMD_NSPAWN_API_VFS_WRITABLE"] = "network"
        with (self.folder / "console.log").open("ab") as log:
            self._nspawn = subprocess.Popen(
                ["sh", "-c", REBOOTING, "sh", *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=self._enter_cgroups,  # noqa: PLW1509 (nothing here has threads)
            )

    def wait(self) -> None:
        """Waits until sshd runs a command."""
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while self.ssh("true", check=False).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} does not answer: {(self.folder / 'console.log').read_text()[-500:]}")
            time.sleep(0.2)

    def ssh(self, command: str, *, check: bool = True, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
        """Runs a shell command on the host as root."""
        argv = ["ssh", "-F", str(self.cluster.ssh_config), "-o", "BatchMode=yes", "-o", "ConnectTimeout=3"]
        return subprocess.run(
            [*argv, self.name, command], capture_output=True, text=True, timeout=timeout_s, check=check
        )

    def processes(self) -> list[psutil.Process]:
        """Returns everything that runs on the host: the processes in its process-id namespace."""
        if self._nspawn is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            for leader in psutil.Process(self._nspawn.pid).children(recursive=True):
                space = _space(leader.pid)
                if space != _space(os.getpid()):
                    return [process for process in psutil.process_iter() if _space(process.pid) == space]
        return []

    def processes_of_run(self, run_dir: Path) -> list[psutil.Process]:
        """Returns the processes of a run on this host."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                if process.environ().get("LOOPWORKS_RUN") == str(run_dir):
                    found.append(process)
        return found

    def kill(self) -> None:
        """Power-cut: everything on the host is gone at once."""
        # The first process of a namespace takes the others with it; nobody must say goodbye for it or start it again.
        starter = psutil.Process(self._nspawn.pid) if self.is_up() and self._nspawn else None
        for process in [*([starter] if starter else []), *self.processes(), *(starter.children() if starter else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._nspawn is not None:
            self._nspawn.wait(20)
        self._nspawn = None

    def is_up(self) -> bool:
        return self._nspawn is not None and self._nspawn.poll() is None

    def cut(self) -> None:
        """Takes the network away."""
        _run("ip", "link", "set", f"v{self.name}", "down")

    def mend(self) -> None:
        """Gives the network back."""
        _run("ip", "link", "set", f"v{self.name}", "up")

    def freeze(self) -> None:
        """The host hangs: TCP connects, nothing answers."""
        for _ in range(2):  # the second time for what was being forked
            self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Wakes the host."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _enter_cgroups(self) -> None:
        """In the child: a group of its own in every hierarchy, or two hosts' systemd would share one."""
        for folder in _hierarchies():
            group = folder / self.cluster.name / self.name
            with contextlib.suppress(OSError):
                group.mkdir(parents=True, exist_ok=True)
                for key in ("cpuset.cpus", "cpuset.mems"):  # version 1 takes no process before these are set
                    for place in (group.parent, group):
                        if (place / key).exists() and not (place / key).read_text().strip():
                            (place / key).write_text((folder / key).read_text())
                (group / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Ends the host and takes its network, disk and groups away."""
        self.thaw()
        self.kill()
        _run("ip", "link", "del", f"v{self.name}", check=False)
        _run("ip", "netns", "del", self.name, check=False)
        _run("umount", "-l", str(self.root), check=False)


class Cluster:
    """N hosts on one bridge, with an ssh_config and known host keys."""

    host_class = Host

    def __init__(
        self, state: Path, tree: Path, count: int, *, name: str, network: str, read_only: list[Path], shared: list[Path]
    ) -> None:
        self.state, self.tree, self.name, self.network = state, tree, name, network
        self.read_only, self.shared = read_only, shared
        self.bridge = f"{name}br"
        self.key = state / "id_ed25519"
        self.ssh_config = state / "ssh_config"
        self.known_hosts = state / "known_hosts"
        self._inotify_before: int | None = None
        self.hosts = [self.host_class(self, index) for index in range(1, count + 1)]

    def up(self) -> None:
        """Creates and boots all hosts and waits until they answer."""
        self.state.mkdir(parents=True, exist_ok=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
        self._clear_network()
        if int(INOTIFY.read_text()) < INOTIFY_INSTANCES:
            self._inotify_before = int(INOTIFY.read_text())
            INOTIFY.write_text(str(INOTIFY_INSTANCES))
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.network}.1/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        for host in self.hosts:
            host.create()
        self.write_known_hosts()
        self.ssh_config.write_text("".join(self.ssh_section(host) for host in self.hosts))
        for host in self.hosts:
            host.boot()
        for host in self.hosts:
            host.wait()

    def _clear_network(self) -> None:
        """Takes away what tests that were killed have left under these names."""
        for link in (self.bridge, *(f"v{host.name}" for host in self.hosts)):
            _run("ip", "link", "del", link, check=False)
        for host in self.hosts:
            _run("ip", "netns", "del", host.name, check=False)

    def write_known_hosts(self) -> None:
        """Notes the present host keys of all hosts."""
        lines = [f"{host.name},{host.address} {host.public_key()}\n" for host in self.hosts]
        self.known_hosts.write_text("".join(lines))

    def hosts_file(self) -> str:
        """Returns /etc/hosts: every host can name every other one."""
        return "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in self.hosts)

    def ssh_section(self, host: Host) -> str:
        """Returns what stands in ssh_config about a host."""
        lines = [f"Host {host.name}", f"HostName {host.address}", "User root", f"IdentityFile {self.key}"]
        lines += ["IdentitiesOnly yes", f"UserKnownHostsFile {self.known_hosts}", "StrictHostKeyChecking yes"]
        return "\n  ".join(lines) + "\n"

    def down(self) -> None:
        """Removes everything; safe to call after a failure half-way."""
        for host in self.hosts:
            host.remove()
        if self._inotify_before is not None:
            INOTIFY.write_text(str(self._inotify_before))
        _run("ip", "link", "del", self.bridge, check=False)
        deadline = time.monotonic() + 5
        while not all(_remove_groups(folder / self.name) for folder in _hierarchies()):
            if time.monotonic() > deadline:
                break  # the kernel still holds one: nothing runs in it
            time.sleep(0.1)
        shutil.rmtree(self.state, ignore_errors=True)


@contextlib.contextmanager
def running(cluster: Cluster) -> Iterator[Cluster]:
    """Inside the block the cluster is up; afterwards nothing of it is left."""
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


def _hierarchies() -> list[Path]:
    """Returns the roots of all cgroup hierarchies (one with version 2, several with version 1)."""
    return [path for path in (CGROUPS, *CGROUPS.glob("*/")) if (path / "cgroup.procs").exists() and _is_root(path)]


def _is_root(path: Path) -> bool:
    return path == CGROUPS or not (CGROUPS / "cgroup.procs").exists()


def _remove_groups(group: Path) -> bool:
    """Removes a cgroup and those below it; False when one is still in use."""
    for path in sorted(group.rglob("*/"), reverse=True):
        with contextlib.suppress(OSError):
            path.rmdir()
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def _space(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _run(*command: str, check: bool = True) -> None:
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if check and outcome.returncode:
        raise RuntimeError(f"{' '.join(command)}: {outcome.stderr.strip()}")
