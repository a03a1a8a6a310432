"""All of a run's checkpointing behind a few calls: resume, due, save, poll, close.

Every method is called by all ranks. Rank 0 alone has the uploader, tells what happened and prunes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from training.checkpoint import catalog, resume
from training.checkpoint.layout import parse_step
from training.checkpoint.policy import Interval
from training.checkpoint.ranks import Ranks
from training.checkpoint.resume import Resumed
from training.checkpoint.saver import Identity, Saver, SaveResult
from training.checkpoint.settings import interval, open_store
from training.checkpoint.state import SavedProgress
from training.checkpoint.upload import OnEvent, Uploader
from training.config.schema import CheckpointSection

MIB = 1 << 20


class _Rule(TypedDict):
    """Retention, as `catalog.prune` takes it."""

    keep_last: int
    keep_every_steps: int | None
    keep_best: int


class CheckpointManager:
    """The checkpoints of one run.

    `on_event(kind, step, text)` is called on rank 0, from this or another thread, with kinds checkpoint,
    checkpoint_failed, checkpoint_uploaded, checkpoint_upload_delayed and resume. Raises RemoteError at once when
    the object store refuses us.
    """

    def __init__(
        self,
        engine: Any,
        root: Path,
        section: CheckpointSection,
        run_name: str,
        identity: Identity,
        ranks: Ranks,
        on_event: OnEvent,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._root, self._section, self._identity = engine, root, section, identity
        self._ranks, self._on_event, self._clock = ranks, on_event, clock
        self._store = open_store(section, run_name) if ranks.rank == 0 else None
        self._uploader: Uploader | None = None
        self._saver = Saver(
            engine, root, ranks, identity, asynchronous=section.asynchronous, after_commit=self._after_commit
        )
        self._interval = interval(section, ranks.world_size)
        self._rule = _Rule(
            keep_last=section.keep_last, keep_every_steps=section.keep_every_steps, keep_best=section.keep_best
        )
        self._last_step, self._last_time = 0, clock()
        self.last_stall_s = 0.0

    @property
    def interval(self) -> Interval:
        """When the next save is due; with `auto` it changes as saves are measured."""
        return self._interval

    def resume(self, *, at_most_step: int | None = None) -> Resumed | None:
        """Loads the newest checkpoint that can be trusted, local or remote; None when there is none at all.

        Raises CheckpointError when there are some, but none can be used.
        """
        self._saver.wait()
        choice = resume.find(self._root, self._ranks, self._store, at_most_step=at_most_step)
        if choice.folder is None and not choice.passed_over:
            return None
        resumed = resume.load(self._engine, choice, self._ranks, self._identity)
        self._last_step, self._last_time = resumed.progress.step, self._clock()
        if self._ranks.rank == 0:
            self._on_event("resume", resumed.progress.step, describe_resume(resumed))
        return resumed

    def start_uploads(self) -> None:
        """Begins to upload what an earlier process left; called once, after `resume`."""
        if self._store is not None and self._uploader is None:
            self._uploader = Uploader(self._store, self._root, self._on_event, after_upload=self._after_upload)

    def due(self, step: int) -> bool:
        """Whether this rank wants a save after optimizer step `step`; the ranks vote, since their clocks differ."""
        if self._ranks.rank != 0 and self._interval.steps is None:
            return False
        return self._interval.due(step, self._last_step, self._clock() - self._last_time)

    def save(self, progress: SavedProgress, evaluation_loss: float | None = None, *, wait: bool = False) -> float:
        """Saves, all ranks together, and returns the seconds that the step loop was held up."""
        self.last_stall_s = self._saver.save(progress, evaluation_loss, wait=wait)
        self._last_step, self._last_time = progress.step, self._clock()
        return self.last_stall_s

    def poll(self) -> list[SaveResult]:
        """Tells and returns what has ended since the last call; called after each step, never waits."""
        return self._tell(self._saver.poll())

    def close(self, upload_timeout_s: float = 0.0) -> list[SaveResult]:
        """Waits for the save in flight and so long for uploads.

        What is still pending then is left for the next process.
        """
        results = self._tell(self._saver.close())
        if self._uploader is not None:
            self._uploader.drain(upload_timeout_s)
            left = self._uploader.close()
            if left:
                text = f"{len(left)} checkpoint(s) still to upload; the next start of the run goes on with them"
                self._on_event("checkpoint_upload_delayed", parse_step(left[0].name) or 0, text)
        return results

    def _tell(self, results: list[SaveResult]) -> list[SaveResult]:
        for result in results:
            if self._section.interval_steps == "auto" and result.ok:
                write_s = result.write_s
                self._interval = interval(self._section, self._ranks.world_size, result.stall_s, write_s)
            if self._ranks.rank == 0:
                kind = "checkpoint" if result.ok else "checkpoint_failed"
                numbers = {"stall_s": result.stall_s, "write_s": result.write_s, "size_bytes": result.size_bytes}
                self._on_event(kind, result.step, describe_save(result), **numbers)
        return results

    def _after_commit(self, folder: Path) -> None:
        """In the saver's thread on rank 0."""
        if self._uploader is not None:
            self._uploader.notice()
        self._prune()

    def _after_upload(self) -> None:
        """In the uploader's thread: retention in the store, and here of what waited for its upload."""
        self._prune()
        if self._store is not None:
            for step in catalog.remote_to_prune(self._store, **self._rule):
                self._store.delete(step)

    def _prune(self) -> None:
        catalog.prune(
            self._root,
            spare=lambda step: self._uploader is not None and self._uploader.is_uploading(step),
            **self._rule,
        )


def describe_save(result: SaveResult) -> str:
    """Returns a line about a save."""
    if result.error is not None:
        return str(result.error)
    return (
        f"saved step {result.step} ({result.size_bytes / MIB:,.1f} MiB; the step loop waited {result.stall_s:.3f} s, "
        f"writing took {result.write_s:.1f} s beside it)"
    )


def describe_resume(resumed: Resumed) -> str:
    """Returns a line about a resume, with what was passed over and why."""
    manifest = resumed.manifest
    text = f"resumed from step {resumed.progress.step}"
    if resumed.converted:
        text += f", converted from {manifest.world_size} ranks, ZeRO stage {manifest.zero_stage}, {manifest.precision}"
    if resumed.passed_over:
        text += "; passed over: " + "; ".join(resumed.passed_over)
    return text
