"""From what the user asked for to a run that is decided but not started. Writes nothing, except the demo's data."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.backends.base import Backend, LaunchSpec
from launch.backends.local import LocalBackend
from launch.errors import RunFailedError, UsageError
from launch.machine import local_facts
from launch.plan import DatasetFacts, RunPlan, build_plan
from launch.runs import LIVE, find_run, observed_state
from launch.supervision import MPIRUN_FILE, NODES_FILE
from training.config import RunConfig, load_config
from training.errors import EXIT_INTERRUPTED
from training.records import RunFolder

CHECKOUT = Path(__file__).resolve().parent.parent
DEFAULT_CONFIG = CHECKOUT / "config.yaml"


@dataclass(frozen=True)
class TrainRequest:
    """What the user asked for. `resume` is the name of a run, "" for the newest one, None for a new run."""

    config: str | None = None
    overrides: tuple[str, ...] = ()
    name: str | None = None
    resume: str | None = None
    console: bool = True


@dataclass(frozen=True)
class PreparedRun:
    """A run that is decided but not started; `folder` is that of a run that goes on, `restarts` how often it may be
    started again after faults where nobody supervises it."""

    config: RunConfig
    plan: RunPlan
    dataset_dir: Path
    folder: RunFolder | None = None
    resume: bool = False
    restarts: int = 0
    backend: Backend = field(default_factory=LocalBackend)

    def plan_file(self) -> dict[str, Any]:
        """Returns what plan.json holds: the plan, where its data lies, and whether to start from a checkpoint."""
        return {**self.plan.as_json(), "dataset_dir": str(self.dataset_dir.absolute()), "resume": self.resume}

    def specs(self, run_dir: str, console: bool) -> list[LaunchSpec]:
        """Returns what would run on each node."""
        return list(self.backend.specs(self.plan, run_dir, str(CHECKOUT), console))

    def remember(self, run: RunFolder) -> None:
        """Notes in the run folder where and by what the run was started, for when it goes on: here, by default."""
        for other in (NODES_FILE, MPIRUN_FILE):
            (run.path / other).unlink(missing_ok=True)


def prepare_run(request: TrainRequest) -> PreparedRun:
    """Reads the configuration and plans the run on this machine. Raises UsageError and ConfigError."""
    config, folder = read_config(request)
    directory = dataset_directory(config)
    plan = build_plan(config, [local_facts()], data_facts(config, directory))
    return PreparedRun(config, plan, directory, folder, resume=folder is not None)


def read_config(request: TrainRequest) -> tuple[RunConfig, RunFolder | None]:
    """Returns the configuration and, for a run that goes on, its folder. Raises UsageError and ConfigError."""
    folder = None if request.resume is None else resumable_run(request)
    overrides = list(request.overrides)
    if request.name is not None:
        overrides.append(f"run.name={json.dumps(request.name)}")
    source = folder.config if folder is not None else request.config or DEFAULT_CONFIG
    return load_config(source, overrides), folder


def resumable_run(request: TrainRequest) -> RunFolder:
    """Returns the folder of the run to go on with. Raises UsageError when it cannot be resumed."""
    if request.config is not None or request.name is not None:
        raise UsageError(
            "--resume goes on with the configuration and the name of the run", "use --set to change single keys"
        )
    directory = load_config(DEFAULT_CONFIG, [o for o in request.overrides if o.startswith("run.dir=")]).run.dir
    folder = find_run(directory, request.resume or None)
    if observed_state(folder).phase in LIVE:
        raise UsageError(f"run {folder.name} is still running", f"stop it first: fab stop --run {folder.name}")
    return folder


def dataset_directory(config: RunConfig) -> Path:
    """Returns the folder of the prepared dataset: the demo's lies in the checkout, of one at s3:// the staged head.

    Of a mixture it is that of the first dataset. Raises UsageError and DataError.
    """
    data = config.data
    if data.mixture is None and data.path == "demo":
        return CHECKOUT / "datasets" / f"demo-{config.model.vocab_size}x{config.model.context_length}"
    path = next(iter(data.mixture)) if data.mixture else data.path
    if path.startswith("s3://"):
        from training.data.staging import stage_head

        return stage_head(path, Path(data.cache_dir).expanduser(), ("manifest.json",))
    directory = Path(path)
    if not (directory / "manifest.json").is_file():
        raise UsageError(
            f"data.path: there is no prepared dataset in {directory} (no manifest.json)",
            "prepare one with fab data.prepare --source TEXT... --out DIR, or use data.path: demo",
        )
    return directory


def data_facts(config: RunConfig, directory: Path) -> DatasetFacts | None:
    """Returns what the plan needs to know of the data of a run; None while the demo is not prepared."""
    if config.data.mixture is None:
        return dataset_facts(directory)
    from training.data.mixture import open_data

    train, held_out = open_data(config.data, "train"), open_data(config.data, "validation")
    return DatasetFacts(len(train), len(held_out), train.sequence_length)


def dataset_facts(directory: Path) -> DatasetFacts | None:
    """Reads what the plan needs from the manifest; None while the dataset is not prepared."""
    from training.data.manifest import read_manifest

    if not (directory / "manifest.json").is_file():
        return None
    manifest = read_manifest(directory)
    return DatasetFacts(manifest.sequences("train"), manifest.sequences("validation"), manifest.sequence_length)


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
