"""`fab train`: configuration, plan, data, run folder, ranks, result."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.backends.base import LaunchSpec, RunHandle
from launch.backends.local import SHUTDOWN_TIMEOUT_S, LocalBackend
from launch.errors import LoopworksError, RunFailedError, StorageError, UsageError
from launch.machine import local_facts
from launch.plan import DatasetFacts, RunPlan, build_plan
from launch.processes import start_time
from launch.runs import create_run
from training.config import RunConfig, load_config
from training.errors import EXIT_FAILED, EXIT_INTERRUPTED
from training.records import RankError, RunFolder

CHECKOUT = Path(__file__).resolve().parent.parent
DEFAULT_CONFIG = CHECKOUT / "config.yaml"
SMALL_FILE_BYTES = 64 * 1024


@dataclass(frozen=True)
class TrainRequest:
    """What the user asked for."""

    config: str | None = None
    overrides: tuple[str, ...] = ()
    name: str | None = None
    nodes: str | None = None
    console: bool = True


@dataclass(frozen=True)
class PreparedRun:
    """A run that is decided but not started."""

    config: RunConfig
    plan: RunPlan
    dataset_dir: Path
    backend: LocalBackend = field(default_factory=LocalBackend)

    def plan_file(self) -> dict[str, Any]:
        """Returns what plan.json holds: the plan and where its data lies."""
        return {**self.plan.as_json(), "dataset_dir": str(self.dataset_dir.absolute())}

    def specs(self, run_dir: str, console: bool) -> list[LaunchSpec]:
        """Returns what would run on each node."""
        return list(self.backend.specs(self.plan, run_dir, str(CHECKOUT), console))


def prepare_run(request: TrainRequest) -> PreparedRun:
    """Reads the configuration and plans the run; writes nothing."""
    if request.nodes is not None and request.nodes not in ("localhost", "127.0.0.1"):
        raise UsageError(
            f"--nodes {request.nodes}: this version trains on the machine where it is called",
            "leave --nodes out, or call fab train on the node itself",
        )
    overrides = list(request.overrides)
    if request.name is not None:
        overrides.append(f"run.name={json.dumps(request.name)}")
    config = load_config(request.config or DEFAULT_CONFIG, overrides)
    directory = dataset_directory(config)
    return PreparedRun(config, build_plan(config, [local_facts()], dataset_facts(directory)), directory)


def dataset_directory(config: RunConfig) -> Path:
    """Returns the folder of the prepared dataset; the demo's lies in the checkout."""
    if config.data.path == "demo":
        return CHECKOUT / "datasets" / f"demo-{config.model.vocab_size}x{config.model.context_length}"
    directory = Path(config.data.path)
    if not (directory / "manifest.json").is_file():
        raise UsageError(
            f"data.path: there is no prepared dataset in {directory} (no manifest.json)",
            "prepare one with fab data.prepare --source TEXT... --out DIR, or use data.path: demo",
        )
    return directory


def dataset_facts(directory: Path) -> DatasetFacts | None:
    """Reads what the plan needs from the manifest; None while the dataset is not prepared."""
    from training.data.manifest import read_manifest

    if not (directory / "manifest.json").is_file():
        return None
    manifest = read_manifest(directory)
    return DatasetFacts(manifest.sequences("train"), manifest.sequences("validation"), manifest.sequence_length)


def train(request: TrainRequest, prepared: PreparedRun | None = None) -> dict[str, Any]:
    """Runs a training to its end and returns its result. Raises LoopworksError; leaves no process behind."""
    prepared = prepared or prepare_run(request)
    if not (prepared.dataset_dir / "manifest.json").is_file():
        prepare_demo(prepared.config, prepared.dataset_dir, console=request.console)
        prepared = prepare_run(request)
    run = create_run(prepared.config, prepared.plan_file(), prepared.plan.total_steps)
    while True:
        code = run_once(prepared, run, request.console)
        smaller = retry_plan(prepared.plan, run.read_errors())
        if code == 0 or smaller is None:
            return finish(run, code)
        run.event(
            "out_of_memory",
            run.read_state().step,
            f"micro-batch {prepared.plan.micro_batch} did not fit; going on with {smaller.micro_batch} "
            f"and accumulation {smaller.accumulation}: the global batch stays {smaller.batch_size}",
        )
        run.clear_errors()
        prepared = replace(prepared, plan=smaller)
        run.write_plan(prepared.plan_file())


def run_once(prepared: PreparedRun, run: RunFolder, console: bool) -> int | None:
    """Starts the ranks, waits for their end and returns the node agent's exit code; nothing stays behind."""
    handle = prepared.backend.start(prepared.specs(str(run.path), console))
    try:
        run.update_state(launcher_pid=handle.pid, launcher_start=start_time(handle.pid))
        return handle.wait()
    except KeyboardInterrupt:
        run.event("interrupt", run.read_state().step, "interrupted from the keyboard: saving and leaving")
        raise RunFailedError("interrupted; the run was asked to save and has ended", "", EXIT_INTERRUPTED) from None
    finally:
        _stop(handle)


def retry_plan(plan: RunPlan, errors: Sequence[RankError]) -> RunPlan | None:
    """Returns the plan to try after a rank ran out of memory; None when that was not it or nothing smaller is left."""
    if not any(error.kind == "out_of_memory" for error in errors) or plan.micro_batch == 1:
        return None
    share = plan.micro_batch * plan.accumulation
    micro = next(size for size in range(plan.micro_batch // 2, 0, -1) if share % size == 0)
    return replace(plan, micro_batch=micro, accumulation=share // micro)


def finish(run: RunFolder, code: int | None) -> dict[str, Any]:
    """Returns the result of an ended run, or raises what made it fail."""
    if code == 0 and run.result.is_file():
        return dict(json.loads(run.result.read_text(encoding="utf-8")))
    phase = run.read_state().phase
    if phase == "stopped":
        raise RunFailedError(f"run {run.name} was stopped", "its model is saved in its folder", EXIT_INTERRUPTED)
    error = failure(run, code)
    if phase != "failed" and not disk_is_full(run):
        run.update_state(phase="failed", message=error.cause)
    raise error


def failure(run: RunFolder, code: int | None) -> LoopworksError:
    """Names the first error of any rank: later ones are often only its echo."""
    errors = run.read_errors()
    if errors:
        first = errors[0]
        remedy = first.remedy or f"the whole story is in {run.rank_log(first.rank)}"
        return RunFailedError(f"rank {first.rank}: {first.cause}", remedy, first.exit_code)
    if disk_is_full(run):
        return StorageError(
            f"the file system of {run.path} is full", "free space, or choose another place: --set run.dir=PATH"
        )
    return RunFailedError(
        f"the ranks of run {run.name} ended with code {code} and left no message (killed from outside?)",
        f"read {run.logs}; on Linux, dmesg tells whether the kernel ended one for want of memory",
        EXIT_FAILED,
    )


def disk_is_full(run: RunFolder) -> bool:
    """True when not even a small file can be written beside the run's."""
    return shutil.disk_usage(run.path).free < SMALL_FILE_BYTES


def prepare_demo(config: RunConfig, directory: Path, console: bool) -> None:
    """Builds the demo dataset from text that the Python installation carries."""
    command = [
        *(sys.executable, "-m", "training.data", "prepare", "--demo"),
        *("--out", str(directory)),
        *("--vocab-size", str(config.model.vocab_size), "--seq-len", str(config.model.context_length)),
    ]
    # With --json, standard output is for the result alone.
    output = None if console else sys.stderr
    outcome = subprocess.run(command, cwd=CHECKOUT, stdin=subprocess.DEVNULL, stdout=output, check=False)
    if outcome.returncode < 0 or outcome.returncode == EXIT_INTERRUPTED:
        raise RunFailedError("interrupted while the demo data was prepared", "call the command again", EXIT_INTERRUPTED)
    if outcome.returncode:
        raise RunFailedError("the demo data could not be prepared (see above)", "", outcome.returncode)


def _stop(handle: RunHandle) -> None:
    """Ends what is left; a second Ctrl-C during the save is noted and does not break it."""
    while True:
        try:
            handle.stop(SHUTDOWN_TIMEOUT_S)
            return
        except KeyboardInterrupt:
            print("still saving; kill -9 would lose it", file=sys.stderr)
