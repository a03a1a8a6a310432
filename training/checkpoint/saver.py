"""Saves a run beside training: a short copy in the step loop, writing and committing in a thread.

One save, on every rank:

    step loop   capture the state in host memory (the stall)
    thread      1. rank 0 makes the staged folder                    all ranks learn whether that went well
                2. each rank writes, hashes and flushes its files    all ranks learn the files and errors of the others
                3. rank 0 commits, or removes the staged folder      all ranks learn the outcome

At most one save is in flight; the next one waits for it, and that wait is part of the measured stall. A failed save
leaves the earlier checkpoints as they are, is reported by `poll`, and training goes on.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from training.checkpoint import engine_io, layout, snapshot
from training.checkpoint.errors import CheckpointError, describe_os_error
from training.checkpoint.layout import FileEntry, Manifest
from training.checkpoint.ranks import Ranks
from training.checkpoint.snapshot import write_all
from training.checkpoint.state import STATE_NAME, SavedProgress, rng_name, rng_state


@dataclass(frozen=True)
class Identity:
    """What a run is of; a resume under another identity is refused or warned about."""

    config_sha256: str
    tokenizer_sha256: str


@dataclass(frozen=True)
class SaveResult:
    """How a save went. `folder` is None when it failed, and `error` says why; times in seconds."""

    step: int
    folder: Path | None
    error: CheckpointError | None
    stall_s: float
    write_s: float
    size_bytes: int

    @property
    def ok(self) -> bool:
        """Whether the checkpoint exists."""
        return self.error is None


class Saver:
    """Saves a DeepSpeed engine into `root`. Every method is called by all ranks, in the same order.

    `after_commit` runs in the thread of rank 0 after each commit (retention, upload); what it raises counts as a
    failed save.
    """

    def __init__(
        self,
        engine: Any,
        root: Path,
        ranks: Ranks,
        identity: Identity,
        *,
        asynchronous: bool = True,
        after_commit: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        self._engine, self._root, self._ranks, self._identity = engine, root, ranks, identity
        self._asynchronous, self._after_commit = asynchronous, after_commit
        self._capturing = engine_io.install(engine)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[SaveResult] | None = None
        self._finished: list[SaveResult] = []

    def save(self, progress: SavedProgress, evaluation_loss: float | None = None, *, wait: bool = False) -> float:
        """Saves the state after optimizer step `progress.step` and returns the seconds that the caller was held up.

        `wait` returns only when the checkpoint is committed (or has failed): before leaving, or where time does not
        matter.
        """
        started = time.perf_counter()
        self.wait()
        files = engine_io.capture(self._engine, self._capturing)
        files[rng_name(self._ranks.rank)] = snapshot.HostCopier().copy("rng", rng_state())
        if self._ranks.rank == 0:
            files[STATE_NAME] = progress.to_bytes(parameter_names=engine_io.parameter_names(self._engine))
        manifest = self._manifest(progress, evaluation_loss)
        stall_s = time.perf_counter() - started
        self._in_flight = self._thread.submit(self._write, files, manifest, stall_s)
        if wait or not self._asynchronous:
            self.wait()
            stall_s = time.perf_counter() - started
        return stall_s

    def poll(self) -> list[SaveResult]:
        """Returns the saves that have ended since the last call.

        Never waits. Results arrive at other steps on other ranks.
        """
        if self._in_flight is not None and self._in_flight.done():
            self.wait()
        finished, self._finished = self._finished, []
        return finished

    def wait(self) -> None:
        """Waits for the save in flight; `poll` then returns its result."""
        if self._in_flight is not None:
            self._finished.append(self._in_flight.result())
            self._in_flight = None

    def close(self) -> list[SaveResult]:
        """Waits for the save in flight, ends the thread and gives the host memory back."""
        self.wait()
        self._thread.shutdown()
        self._capturing.copier.release()
        return self.poll()

    def _manifest(self, progress: SavedProgress, evaluation_loss: float | None) -> Manifest:
        return Manifest(
            step=progress.step,
            world_size=self._ranks.world_size,
            zero_stage=engine_io.zero_stage(self._engine),
            precision=engine_io.precision(self._engine),
            epoch=progress.epoch,
            sample=progress.sample,
            config_sha256=self._identity.config_sha256,
            tokenizer_sha256=self._identity.tokenizer_sha256,
            created_unix_s=time.time(),
            evaluation_loss=evaluation_loss,
        )

    def _write(self, files: dict[str, Any], manifest: Manifest, stall_s: float) -> SaveResult:
        """The save of this rank, in the thread; never raises."""
        started = time.perf_counter()
        folder, entries, error = write_together(self._root, files, manifest, self._ranks, self._after_commit)
        size = sum(entry.size_bytes for entry in entries.values())
        return SaveResult(manifest.step, folder, error, stall_s, time.perf_counter() - started, size)


def write_together(
    root: Path,
    files: dict[str, Any],
    manifest: Manifest,
    ranks: Ranks,
    after_commit: Callable[[Path], None] = lambda folder: None,
) -> tuple[Path | None, dict[str, FileEntry], CheckpointError | None]:
    """Writes the files of all ranks as one checkpoint: (folder, entries of all files, None) or (None, {}, error).

    Called by all ranks, each with its own files; all get the same answer. The error of any rank fails the save for all.
    """
    try:
        first = ranks.rank == 0
        error = _attempt(root, lambda: layout.stage(root, manifest.step)) if first else None
        if error := _worst(ranks.gather(error)):
            return None, {}, error
        staged = layout.staged_path(root, manifest.step)
        entries: dict[str, FileEntry] = {}
        error = _attempt(root, lambda: entries.update(write_all(staged, files)))
        reports = ranks.gather((error, entries))
        everything = {name: entry for _, part in reports for name, entry in part.items()}
        error = _worst([problem for problem, _ in reports])
        if first and error is None:
            error = _attempt(root, lambda: _commit(staged, root, replace(manifest, files=everything), after_commit))
        if first and error is not None:
            shutil.rmtree(staged, ignore_errors=True)  # gives the space of a full disk back
        if error := _worst(ranks.gather(error)):
            return None, {}, error
        return root / layout.step_name(manifest.step), everything, None
    except Exception as lost:  # noqa: BLE001 (a lost rank must not end the thread in silence)
        return (
            None,
            {},
            CheckpointError(
                f"checkpoint of step {manifest.step} not saved: another rank is gone ({type(lost).__name__}: {lost})",
                "the run resumes from the checkpoint before",
            ),
        )


def _commit(staged: Path, root: Path, manifest: Manifest, after_commit: Callable[[Path], None]) -> None:
    missing = [name for name in manifest.files if not (staged / name).is_file()]
    if missing:
        raise CheckpointError(
            f"checkpoint not saved: {missing[0]} was written by another node but is not visible on this one ({root})",
            "put run.dir on a file system that all nodes share",
        )
    folder = layout.commit(staged, root, manifest)
    layout.write_latest(root, manifest.step)
    after_commit(folder)


def _attempt(root: Path, act: Callable[[], object]) -> CheckpointError | None:
    """Runs `act` and returns its failure as an error that can be sent to other ranks."""
    try:
        act()
    except OSError as error:
        return describe_os_error(error, root)
    except CheckpointError as error:
        return error
    except Exception as error:  # noqa: BLE001 (whatever it is, the other ranks must hear of it)
        return CheckpointError(
            f"checkpoint not saved: {type(error).__name__}: {error}", "the next interval tries again"
        )
    return None


def _worst(errors: list[CheckpointError | None]) -> CheckpointError | None:
    """Returns the error of the lowest rank that has one, with its rank in the cause."""
    for rank, error in enumerate(errors):
        if error is not None:
            return error if len(errors) == 1 else CheckpointError(f"rank {rank}: {error.cause}", error.remedy)
    return None
