"""What a command on many nodes costs: seconds a round of the connection pool, and memory, against real sshd endpoints.

    python benchmarks/fanout.py [--endpoints 256] [--json FILE]

One sshd on loopback answers under as many addresses (127.0.1.1 ...); each is a host of its own for the client: its own
connection, host key check, login and command. Needs /usr/sbin/sshd and ssh-keygen.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.nodes import Node
from launch.ssh import POOL_SIZE, HostError, Remote, on_all

CONFIG = """
Port {port}
ListenAddress 0.0.0.0
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
MaxStartups 200
UseDNS no
"""


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[int]:
    """Runs an sshd that takes one key, and gives its port."""
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=30)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = int(one.getsockname()[1])
    (folder / "config").write_text(CONFIG.format(port=port, folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if time.monotonic() > deadline:
                raise TimeoutError("sshd does not listen")
            time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait(10)


def measure(nodes: list[Node]) -> dict[str, float]:
    """One command on all nodes: seconds in all and a round of the pool, and the memory of this process."""

    def act(remote: Remote) -> str:
        try:
            return remote.run("echo $SSH_CONNECTION").text
        finally:
            remote.close()

    began = time.perf_counter()
    answers = on_all([Remote(node) for node in nodes], act)
    seconds = time.perf_counter() - began
    failures = [answer for answer in answers.values() if isinstance(answer, HostError)]
    if failures:
        raise SystemExit(f"{len(failures)} endpoints failed, the first: {failures[0]}")
    rounds = -(-len(nodes) // POOL_SIZE)
    return {
        "endpoints": len(nodes),
        "rounds": rounds,
        "seconds": round(seconds, 2),
        "seconds_a_round": round(seconds / rounds, 3),
        "rss_mib": round(psutil.Process().memory_info().rss / 2**20, 1),
    }


def main() -> int:
    """Measures at growing counts; exit code 1 when time grows worse than linearly with rounds, or memory grows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoints", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counts = [count for count in (16, 64, 256, 1024) if count < options.endpoints] + [options.endpoints]
    with tempfile.TemporaryDirectory() as name, sshd(Path(name)) as port:
        folder = Path(name)
        key = " ".join((folder / "host.pub").read_text().split()[:2])
        addresses = [f"127.0.{1 + i // 250}.{1 + i % 250}" for i in range(options.endpoints)]
        (folder / "known").write_text("".join(f"[{address}]:{port} {key}\n" for address in addresses))
        user = os.environ.get("USER", "root")
        nodes = [Node(a, a, user, port, str(folder / "user"), known_hosts=str(folder / "known")) for a in addresses]
        measure(nodes[:POOL_SIZE])  # imports, first logins
        rows = [measure(nodes[:count]) for count in counts]
    report = {"pool": POOL_SIZE, "machine": f"{os.cpu_count()} cores, {platform.machine()}", "rows": rows}
    report["time_ratio"] = round(rows[-1]["seconds_a_round"] / rows[0]["seconds_a_round"], 2)
    report["memory_ratio"] = round(rows[-1]["rss_mib"] / rows[0]["rss_mib"], 2)
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["time_ratio"] < 1.5 and report["memory_ratio"] < 1.3 else 1


if __name__ == "__main__":
    sys.exit(main())
