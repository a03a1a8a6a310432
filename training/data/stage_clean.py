"""First stage, one part a task: read, clean, hash. What is kept goes to disk with the keys that duplicates share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from training.config.prepare import PrepareSection
from training.data.clean import Dropped, build_steps, clean
from training.data.files import atomic_file
from training.data.minhash import band_count, band_keys
from training.data.sources import Part, read_part
from training.data.textview import TextView
from training.data.workfolder import CleanDocument, WorkFolder, read_json, write_documents, write_json

EXAMPLES = 3
_EXAMPLE_CHARS = 120


class CleanTask(NamedTuple):
    """Everything a worker needs to clean one part."""

    part: Part
    settings: PrepareSection
    work: WorkFolder


@dataclass
class Counts:
    """Documents and bytes of text in and out, and what each rule dropped."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    dropped: dict[str, dict[str, Any]] = field(default_factory=dict)

    def drop(self, rule: str, size: int, origin: str, text: str) -> None:
        """Counts a document that `rule` dropped, and keeps the first ones as examples."""
        entry = self.dropped.setdefault(rule, {"documents": 0, "bytes": 0, "examples": []})
        entry["documents"] += 1
        entry["bytes"] += size
        if len(entry["examples"]) < EXAMPLES:
            entry["examples"].append(
                {"origin": origin, "text": " ".join(text[: 4 * _EXAMPLE_CHARS].split())[:_EXAMPLE_CHARS]}
            )

    def add(self, other: dict[str, Any]) -> None:
        """Adds the counts of another part, given as its JSON."""
        for key in ("documents_in", "bytes_in", "documents_out", "bytes_out"):
            setattr(self, key, getattr(self, key) + other[key])
        for rule, found in other["dropped"].items():
            entry = self.dropped.setdefault(rule, {"documents": 0, "bytes": 0, "examples": []})
            entry["documents"] += found["documents"]
            entry["bytes"] += found["bytes"]
            entry["examples"] = (entry["examples"] + found["examples"])[:EXAMPLES]


def clean_part(task: CleanTask) -> tuple[Part, dict[str, Any]]:
    """Cleans a part unless that was done before; returns it with its counts. Raises DataError, StorageError."""
    marker = task.work.clean(task.part.number, "json")
    done = read_json(marker)
    if done is not None:
        return task.part, done
    counts = Counts()
    keys = _Keys([], [])
    write_documents(task.work.clean(task.part.number, "docs"), _kept_documents(task, counts, keys))
    write_keys(task.work, task.part.number, "exact", np.array(keys.exact, dtype=np.uint64)[:, None])
    if task.settings.dedup.near:
        bands = band_count(task.settings.dedup)
        write_keys(task.work, task.part.number, "near", np.array(keys.near, dtype=np.uint64).reshape(-1, bands))
    done = dict(vars(counts))
    write_json(marker, done)
    return task.part, done


class _Keys(NamedTuple):
    exact: list[int]
    near: list[npt.NDArray[np.uint64]]


def _kept_documents(task: CleanTask, counts: Counts, keys: _Keys) -> Iterator[CleanDocument]:
    steps = build_steps(task.settings)
    dedup = task.settings.dedup
    for document in read_part(task.part, task.settings, task.work.root / "input"):
        counts.documents_in += 1
        size = len(document.text.encode())
        counts.bytes_in += size
        result = clean(document.text, steps)
        if isinstance(result, Dropped):
            counts.drop(result.rule, size, document.origin, document.text)
            continue
        content_hash = hash_text(result)
        keys.exact.append(content_hash)
        if dedup.near:
            keys.near.append(band_keys(result, dedup))
        counts.documents_out += 1
        counts.bytes_out += len(result.text.encode())
        yield CleanDocument(result.text, document.origin, document.keep_whole, content_hash)


def hash_text(view: TextView) -> int:
    """64 bits that documents share when they differ in case and white space alone."""
    return int.from_bytes(hashlib.blake2b(view.lowered, digest_size=8).digest(), "little")


def write_keys(work: WorkFolder, part: int, kind: str, keys: npt.NDArray[np.uint64]) -> None:
    """Writes rows (key, document) sorted by key, so that a range of keys is a slice of the file."""
    documents, each = keys.shape
    rows = np.empty((keys.size, 2), dtype=np.uint64)
    rows[:, 0] = keys.ravel()
    rows[:, 1] = np.repeat(np.arange(documents, dtype=np.uint64), each)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    with atomic_file(work.clean(part, f"keys-{kind}.npy")) as stream:
        np.save(stream, rows)
