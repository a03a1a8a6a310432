"""`fab status`, `fab logs`, `fab stop`, `fab generate`: everything is read from the run folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.errors import RunFailedError, UsageError
from launch.processes import end_processes_of, is_running, processes_of
from launch.request import CHECKOUT
from launch.runs import LIVE, list_runs, observed_state
from training.records import RunFolder

STOP_GRACE_S = 120


def status(directory: str | Path) -> list[dict[str, Any]]:
    """Returns one row a run, the newest first."""
    rows = []
    for folder in list_runs(directory):
        state, metrics = observed_state(folder), folder.read_metrics()
        last = metrics[-1] if metrics else None
        rows.append(
            {
                "name": folder.name,
                "phase": state.phase,
                "step": state.step if last is None else max(state.step, last.step),
                "total_steps": state.total_steps,
                "loss": last.loss if last else None,
                "tokens_per_s": last.tokens_per_s if last else None,
                "mfu_ratio": last.mfu_ratio if last else None,
                "age_s": max(0.0, time.time() - state.started),
                "message": state.message,
            }
        )
    return rows


def follow(path: Path, folder: RunFolder, poll_s: float = 0.3) -> Iterator[str]:
    """Yields the lines of a log as they come, until the run has ended and the file is read."""
    while not path.exists():
        if observed_state(folder).phase not in LIVE:
            return
        time.sleep(poll_s)
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            live = observed_state(folder).phase in LIVE
            # State before text: what was written before the end is then always read.
            yield from file
            if not live:
                return
            time.sleep(poll_s)


def log_file(folder: RunFolder, rank: str | int | None) -> Path:
    """Returns the log of one rank, or that of the run. Raises UsageError when there is none."""
    if rank is not None and not str(rank).isdigit():
        raise UsageError(f"--rank {rank}: a rank is a number from 0", "for example --rank 1")
    path = folder.log if rank is None else folder.rank_log(int(rank))
    if not path.exists() and observed_state(folder).phase not in LIVE:
        known = ", ".join(sorted(p.name for p in folder.logs.glob("*.log"))) or "none"
        raise UsageError(
            f"run {folder.name} has no log {path.name} (it has: {known})", "choose one of those with --rank"
        )
    return path


def stop(folder: RunFolder, grace_s: float = STOP_GRACE_S) -> str:
    """Asks the run to save and leave, ends what is left, and says what happened. Nothing of the run stays alive."""
    state = folder.read_state()
    path = str(folder.path)
    if not processes_of(path) and not is_running(state.launcher_pid, state.launcher_start):
        return f"run {folder.name} is not running (it is {observed_state(folder).phase})"
    folder.event("stop_requested", state.step, "fab stop")
    if state.launcher_pid is not None and is_running(state.launcher_pid, state.launcher_start):
        os.kill(state.launcher_pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while processes_of(path) and time.monotonic() < deadline:
        time.sleep(0.2)
    killed = end_processes_of(path)
    if processes_of(path):
        raise RunFailedError(
            f"processes of run {folder.name} are still alive", "see ps; they may hang in the kernel", 1
        )
    if folder.read_state().phase in LIVE:
        folder.update_state(phase="stopped", message="ended by fab stop")
    return f"run {folder.name} has stopped" + (f"; {killed} process(es) had to be killed" if killed else "")


def export(folder: RunFolder, target: str, form: str, dtype: str, as_json: bool) -> int:
    """Writes the weights of a run into a new folder; returns the exit code of the exporting process."""
    command = [sys.executable, "-m", "training.export", "--run", str(folder.path), "--to", str(Path(target).absolute())]
    command += ["--format", form, "--dtype", dtype, *(["--json"] if as_json else [])]
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT), "DS_ACCELERATOR": "cpu"}
    return subprocess.run(command, cwd=CHECKOUT, env=env, check=False).returncode


def generate(folder: RunFolder, prompt: str, extra: list[str]) -> int:
    """Lets the saved model of a run continue `prompt`; returns the exit code of the generating process."""
    command = [sys.executable, "-m", "training.generate", "--run", str(folder.path), "--prompt", prompt, *extra]
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    return subprocess.run(command, cwd=CHECKOUT, env=env, check=False).returncode
