"""Whether a checkpoint can be trusted: every file compared with the manifest, every fault named."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from training.checkpoint.layout import (
    COMMIT_NAME,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    commit_bytes,
    hash_file,
    iter_files,
    parse_step,
)

FaultKind = Literal[
    "uncommitted", "missing", "truncated", "longer", "changed", "swapped", "extra", "unreadable", "misnamed"
]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with one file."""

    file: str
    kind: FaultKind
    detail: str

    def __str__(self) -> str:
        return f"{self.file}: {self.detail}"


def verify(folder: Path, *, deep: bool = True, workers: int = 4) -> list[Fault]:
    """Returns every fault of the checkpoint in `folder`; an empty list means that it can be trusted.

    `deep` compares the sha256 of each file (reads everything, `workers` files at a time), else only names and sizes.
    """
    manifest, faults = _read_committed(folder)
    if manifest is None:
        return faults
    present = set(iter_files(folder))
    faults += [Fault(name, "extra", "is not in the manifest") for name in sorted(present - manifest.files.keys())]
    faults += [Fault(name, "missing", "is missing") for name in sorted(manifest.files.keys() - present)]
    shared = sorted(present & manifest.files.keys())
    with ThreadPoolExecutor(max_workers=workers) as pool:
        checked = pool.map(lambda name: _check_file(folder, name, manifest.files, deep), shared)
        faults += [fault for fault in checked if fault is not None]
    return faults


def describe(faults: list[Fault], limit: int = 3) -> str:
    """Returns the first faults in one line."""
    shown = "; ".join(str(fault) for fault in faults[:limit])
    return shown + (f"; and {len(faults) - limit} more" if len(faults) > limit else "")


def _read_committed(folder: Path) -> tuple[Manifest | None, list[Fault]]:
    """Reads marker and manifest; the manifest is returned only if both can be believed."""
    data: dict[str, bytes] = {}
    for name in (COMMIT_NAME, MANIFEST_NAME):
        try:
            data[name] = (folder / name).read_bytes()
        except FileNotFoundError:
            kind: FaultKind = "uncommitted" if name == COMMIT_NAME else "missing"
            return None, [Fault(name, kind, "is missing, so this checkpoint was never completed")]
        except OSError as error:
            return None, [Fault(name, "unreadable", f"cannot be read ({error.strerror})")]
    try:
        manifest = Manifest.from_bytes(data[MANIFEST_NAME])
    except ValueError as error:
        return None, [Fault(MANIFEST_NAME, "changed", f"was damaged after the commit ({error})")]
    if data[COMMIT_NAME] != commit_bytes(manifest.step, data[MANIFEST_NAME]):
        return None, [
            Fault(COMMIT_NAME, "changed", f"does not fit {MANIFEST_NAME}; one of the two was changed after the commit")
        ]
    named = parse_step(folder.name)
    if named is not None and named != manifest.step:
        return manifest, [
            Fault(MANIFEST_NAME, "misnamed", f"is of step {manifest.step}, but the folder is {folder.name}")
        ]
    return manifest, []


def _check_file(folder: Path, name: str, files: Mapping[str, FileEntry], deep: bool) -> Fault | None:
    entry, path = files[name], folder / name
    try:
        size = path.stat().st_size
        if size != entry.size_bytes and not deep:
            return _size_fault(name, size, entry)
        actual = hash_file(path) if deep else entry
    except OSError as error:
        return Fault(name, "unreadable", f"cannot be read ({error.strerror})")
    if actual == entry:
        return None
    owner = next((other for other, e in files.items() if e == actual and other != name), None)
    if owner is not None:
        return Fault(name, "swapped", f"holds the content of {owner}")
    if actual.size_bytes != entry.size_bytes:
        return _size_fault(name, actual.size_bytes, entry)
    return Fault(name, "changed", "has another sha256 than when it was saved")


def _size_fault(name: str, size: int, entry: FileEntry) -> Fault:
    if size < entry.size_bytes:
        return Fault(name, "truncated", f"has {size:,} of {entry.size_bytes:,} bytes")
    return Fault(name, "longer", f"has {size:,} bytes instead of {entry.size_bytes:,}")
