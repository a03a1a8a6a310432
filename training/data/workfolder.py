"""The folder of unfinished work inside the output folder: what is done, and for which input and settings.

.work/plan.json             fingerprint of input, settings and program version
.work/clean/000012.docs     documents of part 12 that the rules kept, .keys-*.npy their hashes, .json (last) the counts
.work/dedup/000012.npy      for each of these documents: 0 kept, 1 exact, 2 near duplicate
.work/encoded/000012.json   (last) the shards of part 12; .validation its held-out documents as tokens
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from training.data.files import atomic_file, storage_errors, write_atomically
from training.errors import DataError, UsageError

# Raise it when the same input and settings would give other shards than before.
PIPELINE_VERSION = 1
_RECORD = struct.Struct("<IHBQ")
_REMEDY = "remove the folder and run the command again"


class CleanDocument(NamedTuple):
    """A document that the rules kept; `hash` is 64 bits of its normalised text."""

    text: str
    origin: str
    keep_whole: bool
    hash: int


@dataclass(frozen=True)
class WorkFolder:
    """Paths of a preparation's intermediate files."""

    out: Path

    @property
    def root(self) -> Path:
        """The folder itself."""
        return self.out / ".work"

    def clean(self, part: int, ending: str) -> Path:
        """A file of the cleaning stage."""
        return self.root / "clean" / f"{part:06d}.{ending}"

    def dropped(self, part: int) -> Path:
        """Verdict on each document of a part."""
        return self.root / "dedup" / f"{part:06d}.npy"

    def encoded(self, part: int, ending: str) -> Path:
        """A file of the encoding stage."""
        return self.root / "encoded" / f"{part:06d}.{ending}"

    @property
    def dedup_done(self) -> Path:
        """Counts of the deduplication stage."""
        return self.root / "dedup" / "done.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[WorkFolder]:
        """Keeps a second preparation out of the output folder. Raises UsageError when one is at work there."""
        path = self.out / ".lock"
        with storage_errors(path):
            self.out.mkdir(parents=True, exist_ok=True)
            stream = path.open("w")
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"another preparation is writing to {self.out}", "wait for it, or choose another --out"
                ) from None
            yield self
            path.unlink(missing_ok=True)

    def begin(self, fingerprint: str) -> bool:
        """Makes the folder ready; True when work of an earlier run with the same fingerprint is there to go on with."""
        for folder in (self.out, self.out / "train", self.out / "validation"):
            for path in folder.glob(".*.tmp"):  # left by a run that was killed
                path.unlink(missing_ok=True)
        plan = self.root / "plan.json"
        found = read_json(plan)
        if found and found.get("fingerprint") == fingerprint:
            return True
        shutil.rmtree(self.root, ignore_errors=True)
        for split in ("train", "validation"):
            shutil.rmtree(self.out / split, ignore_errors=True)
        write_json(plan, {"fingerprint": fingerprint})
        return False

    def remove(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self.root, ignore_errors=True)


def fingerprint_of(value: Any) -> str:
    """Hash of a JSON-able description of what a run's result depends on."""
    text = json.dumps([PIPELINE_VERSION, value], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_json(path: Path) -> dict[str, Any] | None:
    """Content of a marker file, None when it is not there. A damaged one counts as absent: it is written again."""
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a marker file in one step. Raises StorageError."""
    write_atomically(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode())


def write_documents(path: Path, documents: Iterable[CleanDocument]) -> None:
    """Writes documents compressed, in one step. Raises StorageError."""
    with atomic_file(path) as raw, zstandard.ZstdCompressor(level=1).stream_writer(raw, closefd=False) as stream:
        for document in documents:
            text, origin = document.text.encode(), document.origin.encode("utf-8", "surrogateescape")[:65535]
            stream.write(_RECORD.pack(len(text), len(origin), document.keep_whole, document.hash))
            stream.write(origin)
            stream.write(text)


def read_documents(path: Path) -> Iterator[CleanDocument]:
    """Documents of `write_documents`, in order. Raises DataError."""
    try:
        with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            while head := _read(stream, _RECORD.size):
                text_bytes, origin_bytes, keep_whole, content_hash = _RECORD.unpack(head)
                origin = _read(stream, origin_bytes).decode("utf-8", "surrogateescape")
                yield CleanDocument(_read(stream, text_bytes).decode(), origin, bool(keep_whole), content_hash)
    except (OSError, zstandard.ZstdError, struct.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: intermediate file is damaged: {error}", _REMEDY) from None


def _read(stream: Any, count: int) -> bytes:
    pieces = []
    while count and (piece := stream.read(count)):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)
