"""Run folders as the control side sees them: made, found, listed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from launch.errors import StorageError, UsageError
from launch.processes import is_running, processes_of
from launch.supervision import Settings, read_settings, read_watch
from training.config import RunConfig, dump_config
from training.records import RunFolder, RunState

# A node's agent reports each second.
SILENCE_S = 30.0
LIVE = ("starting", "training", "evaluating", "saving")


def create_run(config: RunConfig, plan: dict[str, Any], total_steps: int | None, now: float | None = None) -> RunFolder:
    """Makes the run's folder with config.resolved.yaml, plan.json and state.json.

    Raises UsageError when the name is taken, StorageError when the folder cannot be written.
    """
    moment = time.time() if now is None else now
    name = config.run.name or time.strftime("run-%Y%m%d-%H%M%S", time.localtime(moment))
    named = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    folder = RunFolder(Path(config.run.dir).absolute() / name)
    try:
        folder.path.mkdir(parents=True)
        folder.logs.mkdir()
        _describe(folder, named, plan, total_steps, moment)
    except FileExistsError:
        raise UsageError(
            f"there is already a run or file {folder.path}",
            f"choose another name with --name, go on with it by --resume {name}, or remove that folder",
        ) from None
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder


def reopen_run(config: RunConfig, plan: dict[str, Any], total_steps: int | None, now: float | None = None) -> RunFolder:
    """Prepares the folder of a run that ended for its next start; its checkpoints, metrics and events stay.

    Raises StorageError when the folder cannot be written.
    """
    moment = time.time() if now is None else now
    folder = RunFolder(Path(config.run.dir).absolute() / str(config.run.name))
    try:
        folder.clear_errors()
        folder.result.unlink(missing_ok=True)
        _describe(folder, config, plan, total_steps, moment)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder


def _describe(
    folder: RunFolder, config: RunConfig, plan: dict[str, Any], total_steps: int | None, moment: float
) -> None:
    folder.config.write_text(dump_config(config), encoding="utf-8")
    folder.write_plan(plan)
    folder.write_state(RunState(name=folder.name, phase="starting", total_steps=total_steps or 0, started=moment))


def _unwritable(folder: RunFolder, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write the run folder {folder.path}: {error.strerror or error}",
        "free space or correct the permissions, or choose another place with --set run.dir=PATH",
    )


def list_runs(directory: str | Path) -> list[RunFolder]:
    """Returns the run folders in `directory`, the newest first."""
    root = Path(directory)
    if not root.is_dir():
        return []
    folders = [RunFolder(path.absolute()) for path in root.iterdir() if (path / "config.resolved.yaml").is_file()]
    return sorted(folders, key=lambda folder: folder.read_state().started, reverse=True)


def find_run(directory: str | Path, name: str | None) -> RunFolder:
    """Returns the run `name`, or the newest one when no name is given. Raises UsageError naming those that exist."""
    folders = list_runs(directory)
    if name is None:
        if folders:
            return folders[0]
        raise UsageError(f"there are no runs in {directory}", "start one with fab train")
    for folder in folders:
        if name in (folder.name, str(folder.path)):
            return folder
    known = ", ".join(folder.name for folder in folders[:5]) or "none"
    raise UsageError(f"there is no run {name!r} in {directory} (newest: {known})", "see fab status")


def observed_state(folder: RunFolder) -> RunState:
    """Returns the state as it is now: a run whose processes are gone without a word has failed."""
    state = folder.read_state()
    if state.phase in LIVE and (settings := read_settings(folder)) is not None:
        return _observed_on_nodes(folder, state, settings)
    if state.phase in LIVE and not is_running(state.launcher_pid, state.launcher_start):
        if processes_of(str(folder.path)):
            return state.model_copy(
                update={"message": "torchrun is gone, but ranks are still alive: fab stop ends them"}
            )
        return state.model_copy(update={"phase": "failed", "message": "its processes are gone"})
    return state


def _observed_on_nodes(folder: RunFolder, state: RunState, settings: Settings) -> RunState:
    """The same for a run on nodes: its supervisor may be gone while its nodes still report."""
    watch = read_watch(folder)
    if watch is not None and watch.phase == "ended":
        return state.model_copy(update={"phase": "failed", "message": watch.message})
    if watch is not None and is_running(watch.pid, watch.start):
        return state
    beats = [(folder.path / "nodes" / f"{name}.json") for name in settings.facts]
    newest = max((path.stat().st_mtime for path in beats if path.exists()), default=0.0)
    if time.time() - newest < SILENCE_S:
        return state.model_copy(update={"message": "nobody watches it: fab attach"})
    return state.model_copy(update={"phase": "failed", "message": "its nodes are silent: fab resume"})
