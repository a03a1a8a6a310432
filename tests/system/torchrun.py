"""Runs a worker script under torchrun for the system tests, and never longer than it may take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def torchrun(script: str, ranks: int, *arguments: str, timeout_s: float = 240) -> str:
    """Returns the standard output of all ranks; raises AssertionError with the end of their errors when one fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        str(CHECKOUT / "tests" / "system" / script),
        *arguments,
    ]
    env = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # torchrun passes the signal on to its ranks, which are in sessions of their own.
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate()
        raise AssertionError(f"{script} took longer than {timeout_s} s:\n{errors[-3000:]}") from None
    assert process.returncode == 0, errors[-3000:]
    return output
