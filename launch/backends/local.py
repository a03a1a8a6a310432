"""Backend `local`: torchrun on this machine, in a session of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.backends.base import LaunchSpec
from launch.plan import RunPlan
from launch.processes import end_processes_of

# torchrun passes these on to all ranks at once; SIGUSR1 is what schedulers send before they take a node away.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
SHUTDOWN_TIMEOUT_S = 120
# glibc gives large freed blocks back to the kernel, which clears each page again at the next step: 5 to 8 % of a step.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**28),
}


class LocalBackend:
    """Runs all ranks here, under one torchrun."""

    name = "local"

    def specs(self, plan: RunPlan, run_dir: str, checkout: str, console: bool) -> Sequence[LaunchSpec]:
        """Returns the torchrun command and its environment."""
        return [
            LaunchSpec(
                node=plan.nodes[0].name,
                argv=torchrun_command(plan.world_size),
                env=rank_environment(plan, run_dir, checkout, console, cpu_count=os.cpu_count() or 1),
                directory=checkout,
            )
        ]

    def start(self, specs: Sequence[LaunchSpec]) -> LocalRun:
        """Starts torchrun; rank 0 draws its progress on the output it inherits, what torchrun says goes to a file."""
        (spec,) = specs
        run_dir = spec.env["LOOPWORKS_RUN"]
        with (Path(run_dir) / "logs" / "torchrun.log").open("ab") as log:
            process = subprocess.Popen(
                spec.argv,
                env={**os.environ, **spec.env},
                cwd=spec.directory,
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        return LocalRun(process, run_dir)


class LocalRun:
    """torchrun and its ranks on this machine."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: str) -> None:
        self._process = process
        self._run_dir = run_dir

    @property
    def pid(self) -> int:
        """Process id of torchrun."""
        return self._process.pid

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for torchrun."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace_s: float) -> None:
        """Sends SIGTERM once, waits for the save, then ends every process of the run."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self.wait(grace_s)
        end_processes_of(self._run_dir)
        self._process.wait()


def torchrun_command(ranks: int) -> tuple[str, ...]:
    """Returns the command of a single-node run; the configuration goes by file, never as an argument."""
    return (
        sys.executable,
        *("-m", "torch.distributed.run"),
        "--standalone",
        # The host's own name may not resolve; every rank is here.
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        f"--signals-to-handle={SIGNALS}",
        f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}",
        *("-m", "training"),
    )


def rank_environment(plan: RunPlan, run_dir: str, checkout: str, console: bool, cpu_count: int) -> dict[str, str]:
    """Returns the variables that every rank gets."""
    env = {
        "LOOPWORKS_RUN": run_dir,
        "LOOPWORKS_CONSOLE": "1" if console else "0",
        "PYTHONPATH": checkout,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if plan.device == "cpu":
        threads = max(1, cpu_count // plan.world_size)
        env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        env |= KEEP_FREED_MEMORY
        if plan.backend == "gloo":
            env["GLOO_SOCKET_IFNAME"] = "lo"
    return env
