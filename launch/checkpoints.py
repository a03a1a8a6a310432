"""The checkpoints of a run as the control side sees them: listed, verified, fetched, pruned. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launch.errors import UsageError
from training.checkpoint import catalog, layout
from training.checkpoint.catalog import Entry
from training.checkpoint.layout import Manifest
from training.checkpoint.remote import S3Store
from training.checkpoint.settings import checkpoints_folder, open_store
from training.checkpoint.upload_progress import is_uploaded
from training.checkpoint.verify import describe, verify
from training.config import RunConfig, load_config
from training.errors import LoopworksError
from training.records import RunFolder


@dataclass(frozen=True)
class Row:
    """One checkpoint in the listing. `state` is ok, verified, damaged or unfinished; `place` local, remote or both."""

    step: int
    age_s: float | None
    size_bytes: int | None
    world_size: int | None
    zero_stage: int | None
    evaluation_loss: float | None
    state: str
    place: str
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        """Returns the row for --json."""
        return asdict(self)


@dataclass(frozen=True)
class Listing:
    """All checkpoints of a run, oldest first, and what could not be looked at (the store is away, for example)."""

    run: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def all_sound(self) -> bool:
        """Whether nothing is damaged (an unfinished save harms nobody)."""
        return all(row.state != "damaged" for row in self.rows)


def list_checkpoints(run: RunFolder, *, deep: bool = False, now: float | None = None) -> Listing:
    """Returns the checkpoints of a run, local and remote; `deep` reads every local file and compares its sha256."""
    config = _config(run)
    root = checkpoints_folder(run.path)
    moment = time.time() if now is None else now
    found = [_local_row(root, entry, deep, moment) for entry in catalog.scan(root)]
    # Retention may remove one while it is verified, which is no damage.
    rows = [row for row in found if row.state != "damaged" or (root / layout.step_name(row.step)).exists()]
    rows += [_unfinished_row(path) for path in sorted(root.glob(f"{layout.STAGED_PREFIX}step-*"))]
    notes: list[str] = []
    try:
        store = open_store(config.checkpoint, run.name)
        if store is not None:
            rows = _with_remote(rows, store, moment)
    except LoopworksError as error:
        notes.append(error.cause)
    return Listing(run.name, tuple(sorted(rows, key=lambda row: row.step)), tuple(notes))


def fetch_checkpoint(run: RunFolder, step: int | None = None) -> Path:
    """Brings a step (None: the newest) from the object store into the run folder and returns its folder there."""
    store = _store(run)
    steps = store.steps()
    if not steps:
        raise UsageError(f"there is no complete checkpoint in {store.settings.url}", "see `fab checkpoints`")
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        raise UsageError(f"step {chosen} is not in {store.settings.url}", f"it has: {_numbers(steps)}")
    return catalog.fetch(store, chosen, checkpoints_folder(run.path))


def prune_checkpoints(run: RunFolder, *, keep_last: int | None = None, dry_run: bool = False) -> list[tuple[int, str]]:
    """Removes what the retention rule of the run lets go, here and in the store, and returns (step, place) of each.

    `keep_last` overrides the rule of the configuration. Checkpoints that still wait for their upload stay.
    """
    section = _config(run).checkpoint
    if keep_last is not None:
        section = section.model_copy(update={"keep_last": keep_last})
    root = checkpoints_folder(run.path)
    store = open_store(section, run.name)
    remote: list[int] = []
    if store is not None:
        remote = catalog.remote_to_prune(
            store,
            keep_last=section.keep_last,
            keep_every_steps=section.keep_every_steps,
            keep_best=section.keep_best,
        )
    spare = (lambda step: not is_uploaded(root / layout.step_name(step))) if store else (lambda step: False)
    gone = catalog.prune(
        root,
        keep_last=section.keep_last,
        keep_every_steps=section.keep_every_steps,
        keep_best=section.keep_best,
        spare=spare,
        dry_run=dry_run,
    )
    if store is not None and not dry_run:
        for step in remote:
            store.delete(step)
    local = [(layout.parse_step(folder.name) or 0, "local") for folder in gone]
    return local + [(step, "remote") for step in remote]


def _config(run: RunFolder) -> RunConfig:
    return load_config(run.config)


def _store(run: RunFolder) -> S3Store:
    store = open_store(_config(run).checkpoint, run.name)
    if store is None:
        raise UsageError(f"run {run.name} has no object store", "checkpoint.remote names one (s3://bucket/prefix)")
    return store


def _local_row(root: Path, entry: Entry, deep: bool, now: float) -> Row:
    folder = root / layout.step_name(entry.step)
    if entry.manifest is None:
        return Row(entry.step, None, None, None, None, None, "damaged", "local", entry.problem)
    faults = verify(folder, deep=deep)
    state = "damaged" if faults else "verified" if deep else "ok"
    return _row(entry.manifest, state, "local", now, describe(faults) if faults else "")


def _unfinished_row(path: Path) -> Row:
    step = layout.parse_step(path.name.removeprefix(layout.STAGED_PREFIX)) or 0
    return Row(step, None, None, None, None, None, "unfinished", "local", "a save is being written or was interrupted")


def _with_remote(rows: list[Row], store: S3Store, now: float) -> list[Row]:
    steps = store.steps()
    both = {row.step for row in rows if row.step in steps and row.age_s is not None}
    merged = [replace(row, place="both") if row.step in both else row for row in rows]
    for step in steps.keys() - both:
        try:
            merged.append(_row(store.manifest(step), "ok", "remote", now))
        except LoopworksError as error:
            merged.append(Row(step, None, None, None, None, None, "damaged", "remote", error.cause))
    return merged


def _row(manifest: Manifest, state: str, place: str, now: float, detail: str = "") -> Row:
    return Row(
        step=manifest.step,
        age_s=max(0.0, now - manifest.created_unix_s),
        size_bytes=manifest.size_bytes,
        world_size=manifest.world_size,
        zero_stage=manifest.zero_stage,
        evaluation_loss=manifest.evaluation_loss,
        state=state,
        place=place,
        detail=detail,
    )


def _numbers(steps: Iterable[int]) -> str:
    return ", ".join(str(step) for step in sorted(steps))
