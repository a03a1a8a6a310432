"""Second stage: which documents are like an earlier one.

Two documents are alike when they share a key. The keys of each part lie on disk sorted, so all keys can be compared
range by range: memory is bounded by the range, not by the number of documents. The rule is simple and does not depend
on order of work: a document goes when any document before it, in input order, has one of its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training.config.prepare import DedupSection
from training.data.files import atomic_file
from training.data.workfolder import WorkFolder, read_json, write_json

EXACT, NEAR = 1, 2
RULES = {EXACT: "exact_duplicate", NEAR: "near_duplicate"}
# Keys compared at once: 16 bytes each, and about as much again to sort them.
RANGE_ROWS = 8_000_000


def deduplicate(work: WorkFolder, documents: Sequence[int], settings: DedupSection) -> None:
    """Writes a verdict for each document of each part; `documents` are the parts' numbers of documents.

    Raises StorageError.
    """
    if read_json(work.dedup_done) is not None:
        return
    for part, count in enumerate(documents):
        with atomic_file(work.dropped(part)) as stream:
            np.save(stream, np.zeros(count, dtype=np.uint8))
    # The exact verdict comes last and so wins over the near one: an exact copy shares every key.
    for kind, verdict, wanted in (("near", NEAR, settings.near), ("exact", EXACT, settings.exact)):
        paths = [work.clean(part, f"keys-{kind}.npy") for part in range(len(documents))]
        if wanted and any(path.exists() for path in paths):
            _mark_repeats(work, paths, verdict)
    write_json(work.dedup_done, {"parts": len(documents)})


def _mark_repeats(work: WorkFolder, paths: list[Path], verdict: int) -> None:
    files = [np.load(path, mmap_mode="r") for path in paths]
    rows = sum(len(file) for file in files)
    ranges = max(1, -(-rows // RANGE_ROWS))
    # Keys are hashes, so equal slices of their range hold about equally many rows.
    edges = [(2**64 * number) // ranges for number in range(1, ranges)]
    starts = [0] * len(files)
    for edge in [*edges, None]:
        stops = [len(file) if edge is None else int(np.searchsorted(file[:, 0], np.uint64(edge))) for file in files]
        pieces = [np.asarray(file[start:stop]) for file, start, stop in zip(files, starts, stops, strict=True)]
        starts = stops
        for part, repeats in _repeats(pieces):
            verdicts = np.load(work.dropped(part), mmap_mode="r+")
            verdicts[repeats] = verdict
            verdicts.flush()


def _repeats(pieces: list[npt.NDArray[np.uint64]]) -> list[tuple[int, npt.NDArray[np.uint64]]]:
    """(part, documents) of all rows whose key a row before has; pieces are (key, document) rows in part order."""
    keys = np.concatenate([piece[:, 0] for piece in pieces])
    documents = np.concatenate([piece[:, 1] for piece in pieces])
    parts = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    order = np.argsort(keys, kind="stable")
    keys, documents, parts = keys[order], documents[order], parts[order]
    same_key = np.flatnonzero(keys[1:] == keys[:-1]) + 1
    # Within one document two equal keys are no repeat; they follow each other because the sort is stable.
    first = np.concatenate(([True], keys[1:] != keys[:-1])) if keys.size else np.empty(0, dtype=bool)
    owner = np.maximum.accumulate(np.where(first, np.arange(len(keys)), 0))
    other = (documents != documents[owner]) | (parts != parts[owner])
    repeated = same_key[other[same_key]]
    found = parts[repeated]
    return [(int(part), documents[repeated[found == part]]) for part in np.unique(found)]
