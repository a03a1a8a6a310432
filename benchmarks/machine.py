"""What a benchmark result is worth nothing without: commit, machine, versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def description() -> str:
    """Returns one line: commit, processor count, load, Python."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    ).stdout.strip()
    load = os.getloadavg()[0]
    return (
        f"commit {commit or 'unknown'}, {platform.machine()}, {os.cpu_count()} cores (load {load:.1f}), "
        f"Python {platform.python_version()}"
    )


def torchrun(module: str, ranks: int, arguments: list[str]) -> int:
    """Runs `module` under torchrun on this machine's processors, with one thread a rank; returns its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={ranks}", "--max-restarts=0", "-m", module, *arguments]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    env = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(CHECKOUT),
        "PYTHONWARNINGS": "ignore",
    }
    return subprocess.run(command, env=env, cwd=CHECKOUT, check=False).returncode
