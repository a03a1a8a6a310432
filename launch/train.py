"""`fab train`: runs what was decided to its end, and says how it ended."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from launch.backends.base import RunHandle
from launch.backends.local import SHUTDOWN_TIMEOUT_S
from launch.backends.mpirun import LOG as MPIRUN_LOG
from launch.backends.mpirun import death_seen
from launch.errors import LoopworksError, RunFailedError, StorageError
from launch.plan import RunPlan
from launch.processes import start_time
from launch.request import PreparedRun, TrainRequest, prepare_demo, prepare_run
from launch.runs import create_run, reopen_run
from launch.supervision import is_echo
from training.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED
from training.heartbeat import read_heartbeats
from training.metrics import remove_target
from training.records import RankError, RunFolder

SMALL_FILE_BYTES = 64 * 1024


class Terminated(BaseException):
    """This process was asked to end (SIGTERM): the run saves and leaves, to be resumed."""


def train(request: TrainRequest, prepared: PreparedRun | None = None) -> dict[str, Any]:
    """Runs a training to its end and returns its result. Raises LoopworksError; leaves no process behind."""
    prepared = prepared or prepare_run(request)
    if not (prepared.dataset_dir / "manifest.json").is_file():
        prepare_demo(prepared.config, prepared.dataset_dir, console=request.console)
        prepared = prepare_run(request)
    make = create_run if prepared.folder is None else reopen_run
    run = make(prepared.config, prepared.plan_file(), prepared.plan.total_steps)
    prepared.remember(run)
    restarts = 0
    while True:
        code = run_once(prepared, run, request.console)
        smaller = retry_plan(prepared.plan, run.read_errors())
        if code == 0:
            return finish(run, code)
        if smaller is None:
            if restarts >= prepared.restarts or not helps_to_start_again(run):
                return finish(run, code)
            restarts += 1
            _announce_restart(run, f"{failure(run, code).cause}; restart {restarts} of {prepared.restarts}")
            prepared = replace(prepared, resume=True)
            run.write_plan(prepared.plan_file())
            continue
        run.event(
            "out_of_memory",
            run.read_state().step,
            f"micro-batch {prepared.plan.micro_batch} did not fit; going on with {smaller.micro_batch} "
            f"and accumulation {smaller.accumulation}: the global batch stays {smaller.batch_size}",
        )
        run.clear_errors()
        # What was saved before the memory ran out is not lost.
        prepared = replace(prepared, plan=smaller, resume=True)
        run.write_plan(prepared.plan_file())


def helps_to_start_again(run: RunFolder) -> bool:
    """True when another start from the newest checkpoint may end otherwise: not when the run was asked to leave, and
    not when only the user can mend what went wrong."""
    first = next(iter(run.read_errors()), None)
    for_the_user = first is not None and first.expected and first.exit_code == EXIT_CONFIG
    return run.read_state().phase != "stopped" and not for_the_user and not disk_is_full(run)


def _announce_restart(run: RunFolder, text: str) -> None:
    run.event("restart", run.read_state().step, text)
    print(text, file=sys.stderr)
    run.clear_errors()
    run.update_state(phase="starting", message=text)


def run_once(prepared: PreparedRun, run: RunFolder, console: bool) -> int | None:
    """Starts the ranks, waits for their end and returns the node agent's exit code; nothing stays behind."""
    handle = prepared.backend.start(prepared.specs(str(run.path), console))
    try:
        with _termination_as_exception():
            run.update_state(launcher_pid=handle.pid, launcher_start=start_time(handle.pid))
            return handle.wait()
    except KeyboardInterrupt:
        run.event("stop_requested", run.read_state().step, "interrupted from the keyboard")
        raise RunFailedError(
            "interrupted; the run was asked to save and leave", _resume(run), EXIT_INTERRUPTED
        ) from None
    except Terminated:
        raise RunFailedError("terminated; the run was asked to save and leave", _resume(run), EXIT_PREEMPTED) from None
    finally:
        _stop(handle)
        # A rank that was killed could not take its own entry for Prometheus away.
        remove_target(run)


def retry_plan(plan: RunPlan, errors: Sequence[RankError]) -> RunPlan | None:
    """Returns the plan to try after a rank ran out of memory; None when that was not it or nothing smaller is left."""
    if not any(error.kind == "out_of_memory" for error in errors) or plan.micro_batch == 1:
        return None
    share = plan.micro_batch * plan.accumulation
    micro = next(size for size in range(plan.micro_batch // 2, 0, -1) if share % size == 0)
    return replace(plan, micro_batch=micro, accumulation=share // micro)


def finish(run: RunFolder, code: int | None) -> dict[str, Any]:
    """Returns the result of an ended run, or raises what made it end before."""
    state = run.read_state()
    if code == 0 and run.result.is_file():
        return dict(json.loads(run.result.read_text(encoding="utf-8")))
    if state.phase == "stopped":
        # Asked by a person, it was interrupted; otherwise the machine is being taken away.
        asked = any(event.kind == "stop_requested" and event.time >= state.started for event in run.read_events())
        raise RunFailedError(
            f"run {run.name} {state.message}", _resume(run), EXIT_INTERRUPTED if asked else EXIT_PREEMPTED
        )
    error = failure(run, code)
    if state.phase != "failed" and not disk_is_full(run):
        run.update_state(phase="failed", message=error.cause)
    raise error


def failure(run: RunFolder, code: int | None) -> LoopworksError:
    """Names what went wrong first: a rank's own error, or a rank that died without one and left others to tell."""
    errors = run.read_errors()
    first = errors[0] if errors else None
    death = first_death(run, [error.rank for error in errors]) if first is None or is_echo(first) else ""
    if death and not (first is None and disk_is_full(run)):
        remedy = f"read {run.logs}; on Linux, dmesg there tells whether the kernel ended it for want of memory"
        return RunFailedError(death, remedy, EXIT_FAILED)
    if first is not None:
        remedy = first.remedy or f"the whole story is in {run.rank_log(first.rank)}"
        return RunFailedError(f"rank {first.rank}: {first.cause}", remedy, first.exit_code)
    if disk_is_full(run):
        return storage_full(run)
    return RunFailedError(
        f"the ranks of run {run.name} ended with code {code} and left no message (killed from outside?)",
        f"read {run.logs}; on Linux, dmesg tells whether the kernel ended one for want of memory",
        EXIT_FAILED,
    )


def first_death(run: RunFolder, with_message: Sequence[int]) -> str:
    """Says which rank died first without a message: what mpirun saw, or the only one that neither ended nor spoke."""
    try:
        if seen := death_seen((run.logs / MPIRUN_LOG).read_text(encoding="utf-8", errors="replace")):
            return seen
    except OSError:
        pass  # not started by mpirun
    started = run.read_state().started
    beats = [beat for beat in read_heartbeats(run.path / "heartbeats") if beat.time >= started]
    silent = [beat.rank for beat in beats if beat.phase != "ended" and beat.rank not in with_message]
    return f"rank {silent[0]} died without a message (killed from outside?)" if len(silent) == 1 else ""


def disk_is_full(run: RunFolder) -> bool:
    """True when not even a small file can be written beside the run's."""
    return shutil.disk_usage(run.path).free < SMALL_FILE_BYTES


def storage_full(run: RunFolder, error: OSError | None = None) -> StorageError:
    """Returns the message for a run whose file system is full."""
    detail = f" ({error})" if error is not None else ""
    remedy = f"free space and go on with: fab resume --run {run.name}; or choose another place: --set run.dir=PATH"
    return StorageError(f"the file system of {run.path} is full{detail}", remedy)


def _resume(run: RunFolder) -> str:
    return f"go on with it by: fab train --resume {run.name}"


@contextlib.contextmanager
def _termination_as_exception() -> Iterator[None]:
    """Inside the block SIGTERM raises Terminated, so that the ranks are told before this process ends."""

    def handle(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(handle: RunHandle) -> None:
    """Ends what is left; a second Ctrl-C during the save is noted and does not break it."""
    while True:
        try:
            handle.stop(SHUTDOWN_TIMEOUT_S)
            return
        except KeyboardInterrupt:
            print("still saving; kill -9 would lose it", file=sys.stderr)
