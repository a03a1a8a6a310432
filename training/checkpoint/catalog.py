"""Which checkpoints there are, here and in the object store, and which of them to resume from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from training.checkpoint import layout
from training.checkpoint.errors import CheckpointError, RemoteError, RemoteUnavailable
from training.checkpoint.layout import Manifest
from training.checkpoint.policy import Kept, to_keep
from training.checkpoint.verify import describe, verify

Place = Literal["local", "remote"]


class Remote(Protocol):
    """What the catalog needs of an object store."""

    def steps(self) -> dict[int, str]:
        """Returns the committed steps and the content of each one's marker."""

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of a committed step, checked against its marker."""

    def download(self, step: int, target: Path, manifest: Manifest) -> None:
        """Fetches the files that `target` lacks or has damaged."""


@dataclass(frozen=True)
class Entry:
    """One checkpoint in one place; `manifest` is None where it cannot be read, and `problem` says why."""

    step: int
    place: Place
    manifest: Manifest | None
    problem: str = ""


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that was newer than the chosen one, and why it was not taken."""

    step: int
    place: Place
    reason: str

    def __str__(self) -> str:
        return f"{layout.step_name(self.step)} ({self.place}): {self.reason}"


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from (`folder` None: there is none) and those passed over, newest first."""

    folder: Path | None
    manifest: Manifest | None
    passed_over: tuple[PassedOver, ...] = ()
    fetched: bool = False


def scan(root: Path) -> list[Entry]:
    """Returns the checkpoints in `root`, oldest first; only marker and manifest are read, `verify` reads the rest."""
    entries = []
    for folder in sorted(root.glob("step-*")) if root.is_dir() else ():
        step = layout.parse_step(folder.name)
        if step is None:
            continue
        # Read once: retention may remove it at any moment.
        manifest = layout.committed_manifest(folder)
        if manifest is not None:
            entries.append(Entry(step, "local", manifest))
        elif folder.exists():
            entries.append(Entry(step, "local", None, describe(verify(folder, deep=False))))
    return sorted(entries, key=lambda entry: entry.step)


def newest_valid(root: Path, remote: Remote | None = None, *, at_most_step: int | None = None) -> Choice:
    """Returns the newest checkpoint that verifies, fetched from `remote` where the local copy is missing or damaged.

    `at_most_step` looks only at steps up to that one. A store that is away is reported as passed over and does not stop
    the search.
    """
    passed: list[PassedOver] = []
    local = {entry.step for entry in scan(root)}
    stored = _remote_steps(remote, passed)
    for step in sorted(local | stored.keys(), reverse=True):
        if at_most_step is not None and step > at_most_step:
            continue
        folder = root / layout.step_name(step)
        if step in local:
            faults = verify(folder)
            if not faults:
                return Choice(folder, layout.read_manifest(folder), tuple(passed))
            passed.append(PassedOver(step, "local", describe(faults)))
        if step in stored and remote is not None:
            try:
                fetch(remote, step, root)
                return Choice(folder, layout.read_manifest(folder), tuple(passed), fetched=True)
            except (CheckpointError, RemoteError, RemoteUnavailable) as error:
                passed.append(PassedOver(step, "remote", error.cause))
    return Choice(None, None, tuple(passed))


def fetch(remote: Remote, step: int, root: Path) -> Path:
    """Brings a step from the store into `root`, by way of a staged folder, verifies it and returns its folder.

    Files of an earlier, interrupted fetch are kept when they verify. Raises RemoteError, RemoteUnavailable,
    CheckpointError.
    """
    manifest = remote.manifest(step)
    staged = root / f".fetch-{layout.step_name(step)}"
    staged.mkdir(parents=True, exist_ok=True)
    _reuse_local_files(root / layout.step_name(step), staged, manifest)
    remote.download(step, staged, manifest)
    for name in set(layout.iter_files(staged)) - manifest.files.keys():
        (staged / name).unlink()
    for marker in (layout.COMMIT_NAME, layout.MANIFEST_NAME):
        (staged / marker).unlink(missing_ok=True)
    folder = layout.commit(staged, root, manifest)
    faults = verify(folder)
    if faults:
        raise CheckpointError(
            f"{folder.name} is damaged in the object store: {describe(faults)}", "take another step (`fab checkpoints`)"
        )
    return folder


def prune(
    root: Path,
    *,
    keep_last: int,
    keep_every_steps: int | None = None,
    keep_best: int = 0,
    spare: Callable[[int], bool] = lambda step: False,
    dry_run: bool = False,
) -> list[Path]:
    """Removes the checkpoints that the retention rule lets go, returns their folders; `spare` holds single ones back.

    Damaged ones do not count as kept, and are left for a person to look at. Several threads and processes may be at it.
    """
    whole = [entry for entry in scan(root) if entry.manifest is not None]
    keep = to_keep(
        [Kept(e.step, e.manifest.evaluation_loss if e.manifest else None) for e in whole],
        keep_last=keep_last,
        keep_every_steps=keep_every_steps,
        keep_best=keep_best,
    )
    gone = [root / layout.step_name(e.step) for e in whole if e.step not in keep and not spare(e.step)]
    return gone if dry_run else [folder for folder in gone if _remove(folder)]


def _remove(folder: Path) -> bool:
    """Removes a checkpoint; False when another is removing it, or has."""
    try:
        # Without its marker it is no checkpoint any more, so an interrupted removal cannot leave half of one.
        (folder / layout.COMMIT_NAME).unlink()
    except FileNotFoundError:
        return False
    layout.flush(folder)
    shutil.rmtree(folder)
    return True


def remote_to_prune(
    remote: Remote, *, keep_last: int, keep_every_steps: int | None = None, keep_best: int = 0
) -> list[int]:
    """Returns the steps in the store that the retention rule lets go."""
    known = [Kept(step, remote.manifest(step).evaluation_loss) for step in remote.steps()]
    keep = to_keep(known, keep_last=keep_last, keep_every_steps=keep_every_steps, keep_best=keep_best)
    return sorted(entry.step for entry in known if entry.step not in keep)


def _remote_steps(remote: Remote | None, passed: list[PassedOver]) -> dict[int, str]:
    if remote is None:
        return {}
    try:
        return remote.steps()
    except (RemoteError, RemoteUnavailable) as error:
        passed.append(PassedOver(-1, "remote", error.cause))
        return {}


def _reuse_local_files(source: Path, staged: Path, manifest: Manifest) -> None:
    """Links the files of a damaged local copy that are still sound, so that only the others are fetched."""
    for name, entry in manifest.files.items():
        path, target = source / name, staged / name
        if target.exists() or not path.is_file() or path.stat().st_size != entry.size_bytes:
            continue
        if layout.hash_file(path) == entry:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)
