"""How a checkpoint lies on disk, and the protocol that makes it exist.

    checkpoints/
      step-00000120/            exists only complete: the rename into this name is the last act
        deepspeed/*.pt          DeepSpeed's own files, one set per rank
        state.json              counters, data cursor
        rng/rank-00000.pt       random state, one file per rank
        manifest.json           size and sha256 of every file above, and what the checkpoint is of
        COMMIT                  written last: step and the manifest's own sha256
      .staged-step-00000140/    being written; ignored by every reader
      latest                    a hint for people; no reader trusts it

A folder counts when COMMIT does, and COMMIT counts when the manifest it names does. Every file and folder is flushed to
the disk before the next act, so a crash at any moment leaves either the old state or the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from training.checkpoint.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
COMMIT_NAME = "COMMIT"
LATEST_NAME = "latest"
STAGED_PREFIX = ".staged-"
REPLACED_PREFIX = ".replaced-"
FORMAT_VERSION = 1
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """Size and hash of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of, and the files it consists of (names relative to its folder, with '/')."""

    step: int
    world_size: int
    zero_stage: int
    precision: str
    epoch: int
    sample: int
    config_sha256: str
    tokenizer_sha256: str
    created_unix_s: float
    evaluation_loss: float | None = None
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    version: int = FORMAT_VERSION

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size_bytes for entry in self.files.values())

    def to_bytes(self) -> bytes:
        """Returns the one spelling of this manifest (sorted keys, so that its hash is stable)."""
        return (json.dumps(asdict(self), sort_keys=True, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Reads a manifest. Raises ValueError if it is not one."""
        try:
            raw: dict[str, Any] = json.loads(data)
            if raw["version"] > FORMAT_VERSION:
                raise ValueError(f"format version {raw['version']} is newer than this program's {FORMAT_VERSION}")
            files = {
                name: FileEntry(int(e["size_bytes"]), str(e["sha256"])) for name, e in sorted(raw.pop("files").items())
            }
            if not all(is_safe_name(name) for name in files):
                raise ValueError("it names a file outside of the checkpoint")
            return cls(**raw, files=files)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a manifest: {type(error).__name__}: {error}") from None


def is_safe_name(name: str) -> bool:
    """Whether `name` stays below the folder it is joined to (a manifest may come from elsewhere)."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def step_name(step: int) -> str:
    """Returns the folder name of a step, for example step-00000120."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Returns the step in a folder name, or None for any other name."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match.group(1)) if match else None


def commit_bytes(step: int, manifest: bytes) -> bytes:
    """Returns the only valid content of COMMIT for these manifest bytes."""
    return f'{{"manifest_sha256": "{hashlib.sha256(manifest).hexdigest()}", "step": {step}}}\n'.encode()


def staged_path(root: Path, step: int) -> Path:
    """Where the ranks write step `step` before it is committed."""
    return root / f"{STAGED_PREFIX}{step_name(step)}"


def stage(root: Path, step: int) -> Path:
    """Makes an empty staged folder for `step` (one rank calls this, the others then write into it)."""
    path = staged_path(root, step)
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def commit(staged: Path, root: Path, manifest: Manifest) -> Path:
    """Makes the staged files, which must be flushed already, a checkpoint and returns its folder.

    A checkpoint of the same step that is there already is replaced. Raises OSError; readers then see no change.
    """
    data = manifest.to_bytes()
    for folder in sorted({(staged / name).parent for name in manifest.files}):
        flush(folder)
    write_file(staged / MANIFEST_NAME, data)
    write_file(staged / COMMIT_NAME, commit_bytes(manifest.step, data))
    flush(root)
    final = root / step_name(manifest.step)
    _put_in_place(staged, final)
    return final


def _put_in_place(staged: Path, final: Path) -> None:
    """Renames a complete staged folder to its name; one that bears the name already is set aside first."""
    replaced = final.with_name(f"{REPLACED_PREFIX}{final.name}")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    staged.rename(final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(root: Path) -> list[str]:
    """Brings `root` back into order after a crash; returns what was done, one line each. One process calls it at start.

    A staged folder that has its COMMIT only lacks the rename, which is made up for; one without is removed.
    """
    notes: list[str] = []
    for path in sorted(root.glob(f"{STAGED_PREFIX}step-*")):
        final = root / path.name.removeprefix(STAGED_PREFIX)
        if is_committed(path):
            _put_in_place(path, final)
            notes.append(f"{final.name}: was complete but not yet in place; finished")
        else:
            shutil.rmtree(path)
            notes.append(f"{final.name}: save was interrupted; removed the unfinished folder")
    for path in sorted(root.glob(f"{REPLACED_PREFIX}step-*")):
        final = root / path.name.removeprefix(REPLACED_PREFIX)
        if final.exists():
            shutil.rmtree(path)
        else:
            path.rename(final)
            notes.append(f"{final.name}: put back after an interrupted replacement")
    return notes


def committed_manifest(folder: Path) -> Manifest | None:
    """Returns the manifest of `folder` when its commit marker fits (the other files are not looked at), else None."""
    try:
        data = (folder / MANIFEST_NAME).read_bytes()
        manifest = Manifest.from_bytes(data)
        return manifest if (folder / COMMIT_NAME).read_bytes() == commit_bytes(manifest.step, data) else None
    except (OSError, ValueError):
        return None


def is_committed(folder: Path) -> bool:
    """Whether the commit marker of `folder` fits its manifest (the other files are not looked at)."""
    return committed_manifest(folder) is not None


def last_save(root: Path) -> float | None:
    """Returns when the newest checkpoint in `root` was committed (Unix time), None where there is none.

    Cheap enough to ask each second: one listing and the time of one file. That of a folder would not do, since removing
    an old checkpoint changes it too.
    """
    found = ((parse_step(folder.name), folder / COMMIT_NAME) for folder in root.glob("step-*"))
    for _, marker in sorted(((step, path) for step, path in found if step is not None), reverse=True):
        # Never completed, or removed by retention at this moment (on NFS: a stale handle).
        with contextlib.suppress(OSError):
            return marker.stat().st_mtime
    return None


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint. Raises CheckpointError."""
    try:
        return Manifest.from_bytes((folder / MANIFEST_NAME).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a checkpoint: it has no {MANIFEST_NAME}", "`fab checkpoints` lists those there are"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {folder / MANIFEST_NAME}: {error}", "take another step; `fab checkpoints --verify` lists them"
        ) from None


def write_latest(root: Path, step: int) -> None:
    """Updates the `latest` hint."""
    write_file(root / LATEST_NAME, f"{step_name(step)}\n".encode())


def write_file(path: Path, data: bytes) -> None:
    """Writes a small file so that readers see the old content or the new, and flushes it to the disk."""
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Flushes a file or the entries of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> FileEntry:
    """Reads a file once and returns its size and sha256."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size, digest.hexdigest())


def iter_files(folder: Path) -> Iterator[str]:
    """Yields the names (with '/', relative to `folder`) of all files below it, without manifest and marker."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_dir() and name not in (MANIFEST_NAME, COMMIT_NAME):
            yield name
