"""Finds and ends the processes of one run on this machine, and of no other."""

from __future__ import annotations

import os

import psutil


def processes_of(run_dir: str) -> list[psutil.Process]:
    """Returns the processes that belong to the run: those that were started with its folder in LOOPWORKS_RUN.

    Ranks live in sessions of their own, so neither a process group nor the tree of a dead torchrun would find them all.
    """
    own = os.getpid()
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != own and process.environ().get("LOOPWORKS_RUN") == run_dir:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # gone meanwhile, or another user's
    return found


def end_processes_of(run_dir: str, grace_s: float = 5.0) -> int:
    """Ends every process of the run: SIGTERM, then SIGKILL after `grace_s`. Returns how many had to be killed."""
    processes = processes_of(run_dir)
    for process in processes:
        _signal(process.terminate)
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=grace_s)
    return len(alive)


def is_running(pid: int | None, started: float | None) -> bool:
    """True when `pid` is still the process that began at `started` (Unix time): process ids are used again."""
    if pid is None:
        return False
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and (
            started is None or abs(process.create_time() - started) < 2
        )
    except psutil.NoSuchProcess:
        return False


def start_time(pid: int) -> float:
    """Returns when the process began, Unix time."""
    return float(psutil.Process(pid).create_time())


def _signal(action: object) -> None:
    try:
        action()  # type: ignore[operator]
    except psutil.NoSuchProcess:
        return
