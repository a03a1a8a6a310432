"""Checks a prepared dataset against its manifest: every file, every hash, every record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from training.data.dataset import check_tokenizer
from training.data.files import sha256_of
from training.data.formats import ShardLayout, ShardReader, TokenArray, get_format
from training.data.manifest import Manifest, ShardEntry, read_manifest
from training.data.progress import progress
from training.data.workers import run_tasks, worker_count
from training.errors import DataError, LoopworksError

_BLOCK_BYTES = 4_000_000
# More than this many bad records of one shard say no more than these do.
MAX_RECORD_FAULTS = 20


@dataclass(frozen=True)
class VerifyResult:
    """What was checked, and everything that is wrong, one line each (file, record and offset where there is one)."""

    shards: int
    sequences: int
    bytes: int
    faults: tuple[str, ...]


class _Task(NamedTuple):
    folder: Path
    manifest_format: str
    layout: ShardLayout
    vocab_size: int
    pad: int | None
    shard: ShardEntry


def verify_dataset(folder: Path, workers: int = 0) -> VerifyResult:
    """Reads all of the dataset in `folder`. Raises DataError when there is no manifest that can be read."""
    manifest = read_manifest(folder)
    tasks = list(_tasks(folder, manifest))
    faults = list(_tokenizer_faults(folder, manifest))
    total = sum(task.shard.bytes for task in tasks)
    count = max(1, min(worker_count(workers), len(tasks)))
    with progress("verify", total) as advance:
        for shard, found in run_tasks(_verify_shard, tasks, count):
            faults += found
            advance(shard.bytes)
    return VerifyResult(len(tasks), sum(task.shard.sequences for task in tasks), total, tuple(sorted(faults)))


def _tasks(folder: Path, manifest: Manifest) -> Iterator[_Task]:
    layout = ShardLayout(manifest.sequence_length + 1, manifest.token_dtype)
    for shards in manifest.splits.values():
        for shard in shards:
            yield _Task(folder, manifest.format, layout, manifest.vocab_size, manifest.pad_token_id, shard)


def _tokenizer_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    try:
        check_tokenizer(folder / manifest.tokenizer_file, manifest)
    except DataError as error:
        yield error.cause


def _verify_shard(task: _Task) -> tuple[ShardEntry, list[str]]:
    path = task.folder / task.shard.file
    try:
        size, digest = path.stat().st_size, sha256_of(path)
    except OSError as error:
        return task.shard, [f"{path}: cannot be read: {error.strerror}"]
    faults = []
    if size != task.shard.bytes:
        faults.append(f"{path}: {size} bytes, the manifest says {task.shard.bytes}")
    elif digest != task.shard.sha256:
        faults.append(f"{path}: sha256 is {digest[:12]}..., the manifest says {task.shard.sha256[:12]}...")
    try:
        reader = get_format(task.manifest_format).open_reader(path, task.layout, True)
    except LoopworksError as error:
        return task.shard, [*faults, error.cause]
    try:
        faults += _verify_records(reader, task, path)
    finally:
        reader.close()
    return task.shard, faults


def _verify_records(reader: ShardReader, task: _Task, path: Path) -> list[str]:
    faults: list[str] = []
    if len(reader) != task.shard.sequences:
        faults.append(f"{path}: {len(reader)} sequences, the manifest says {task.shard.sequences}")
    step = max(1, _BLOCK_BYTES // (task.layout.tokens * np.dtype(task.layout.dtype).itemsize))
    tokens = bad = 0
    for start in range(0, len(reader), step):
        for first, rows, fault in _read_around_faults(reader, start, min(start + step, len(reader))):
            if rows is None:
                bad += 1
                if bad <= MAX_RECORD_FAULTS:
                    faults.append(fault)
                continue
            tokens += rows.size if task.pad is None else int((rows != task.pad).sum())
            if rows.size and int(rows.max()) >= task.vocab_size:
                record = first + int(np.argmax(rows.max(axis=1) >= task.vocab_size))
                faults.append(f"{path}: record {record} has a token outside the vocabulary of {task.vocab_size}")
    if bad > MAX_RECORD_FAULTS:
        faults.append(f"{path}: {bad - MAX_RECORD_FAULTS} more records are damaged")
    if not bad and tokens != task.shard.tokens:
        faults.append(f"{path}: {tokens} tokens, the manifest says {task.shard.tokens}")
    return faults


def _read_around_faults(reader: ShardReader, start: int, stop: int) -> Iterator[tuple[int, TokenArray | None, str]]:
    """(first record, rows, "") of what can be read and (record, None, fault) of what cannot."""
    try:
        yield start, reader.read(start, stop), ""
        return
    except DataError as error:
        if stop - start == 1:
            yield start, None, error.cause
            return
    middle = (start + stop) // 2
    yield from _read_around_faults(reader, start, middle)
    yield from _read_around_faults(reader, middle, stop)
