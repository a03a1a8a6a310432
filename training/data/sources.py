"""Where text comes from: files are listed, cut into parts of a bounded size, and read document by document.

A part is what one worker takes at once. The cut depends on the files and the settings alone, never on the number of
workers, so that a run on other hardware, or after a kill, makes the same shards.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from training.config.prepare import PrepareSection
from training.data import readers, s3
from training.errors import DataError, UsageError

DEMO_SOURCE = "demo"
# Parts should outnumber workers even where there is little text, but not become tiny.
MIN_PART_BYTES = 1_000_000
_PARTS_WANTED = 64
# A row group has no size of its own in bytes; only progress goes by this.
_PARQUET_GROUP_BYTES = 16_000_000
# Tests and tables of character codes do not read as text.
_DEMO_SKIP = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}


class Document(NamedTuple):
    """Text with its origin, "file:offset", and whether packing must keep all of it."""

    text: str
    origin: str
    keep_whole: bool = False


class Span(NamedTuple):
    """A piece of a file: bytes (or row groups of Parquet) start..stop-1, read by the reader called `kind`.

    `size` and `mtime_ns` tell whether the file is still the one that was planned with.
    """

    path: str
    kind: str
    start: int
    stop: int
    size: int
    mtime_ns: int
    keep_whole: bool


@dataclass(frozen=True)
class Part:
    """A piece of the input that one worker takes at once."""

    number: int
    spans: tuple[Span, ...]

    @property
    def bytes(self) -> int:
        """Size of the input files' pieces, as stored."""
        return sum(_PARQUET_GROUP_BYTES if _is_row_group(span) else span.stop - span.start for span in self.spans)


def plan_parts(sources: Iterable[str], settings: PrepareSection) -> list[Part]:
    """Lists the files of `sources` and cuts them into parts.

    Raises UsageError for a source that is not there, is of no known kind, or contains nothing to read.
    """
    files = [file for source in sources for file in _list_source(source, settings)]
    total = sum(size for _, _, size, _, _ in files)
    limit = max(MIN_PART_BYTES, min(settings.part_bytes, -(-total // _PARTS_WANTED)))
    spans = itertools.chain.from_iterable(_spans(file, limit, settings.max_document_bytes) for file in files)
    return [Part(number, tuple(group)) for number, group in enumerate(_group(spans, limit))]


# Path or s3:// address, reader, size in bytes, time of last change in ns, keep whole.
_File = tuple[str, str, int, int, bool]


def _list_source(source: str, settings: PrepareSection) -> list[_File]:
    if source == DEMO_SOURCE:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [p for p in sorted(root.rglob("*.py")) if not _DEMO_SKIP & set(p.relative_to(root).parts)]
        return [_describe(path, "python", False) for path in paths]
    keep = source in settings.keep_whole
    if source.startswith(s3.PREFIX):
        return _list_s3(source, keep)
    root = Path(source)
    if root.is_dir():
        found = [(path, readers.kind_of(path)) for path in sorted(root.rglob("*")) if path.is_file()]
        files = [_describe(path, kind, keep) for path, kind in found if kind]
        if not files:
            raise UsageError(
                f"the folder {source} contains no file to read", f"known endings: {', '.join(readers.SUFFIXES)}"
            )
        return files
    if not root.exists():
        raise UsageError(f"the source {source} does not exist", "check the path given with --source")
    kind = readers.kind_of(root)
    if not kind:
        raise UsageError(f"the source {source} is of no known kind", f"known endings: {', '.join(readers.SUFFIXES)}")
    return [_describe(root, kind, keep)]


def _list_s3(source: str, keep_whole: bool) -> list[_File]:
    found = [(entry, readers.kind_of(PurePosixPath(entry.url))) for entry in s3.list_objects(source)]
    files = [(entry.url, kind, entry.size, entry.mtime_ns, keep_whole) for entry, kind in found if kind]
    if not files:
        raise UsageError(f"there is nothing to read at {source}", f"known endings: {', '.join(readers.SUFFIXES)}")
    return files


def _describe(path: Path, kind: str, keep_whole: bool) -> _File:
    try:
        status = path.stat()
    except OSError as error:
        raise UsageError(
            f"the source {path} cannot be read: {error.strerror}", "check the path and its permissions"
        ) from None
    return str(path), kind, status.st_size, status.st_mtime_ns, keep_whole


def _spans(file: _File, limit: int, document_bytes: int) -> Iterator[Span]:
    path, kind, size, mtime_ns, keep = file
    pieces: Iterable[tuple[int, int]] = [(0, size)]
    if path.startswith(s3.PREFIX):
        pieces = [(0, size)]  # fetched as a whole, so read as a whole
    elif kind == "parquet":
        pieces = [(group, group + 1) for group in range(readers.parquet_row_groups(Path(path)))]
    elif kind in readers.SPLITTABLE:
        step = max(limit, document_bytes) if kind == "text" else limit  # a plain text file is one document
        pieces = [(start, min(start + step, size)) for start in range(0, size, step)]
    for start, stop in pieces:
        yield Span(path, kind, start, stop, size, mtime_ns, keep)


def _group(spans: Iterable[Span], limit: int) -> Iterator[list[Span]]:
    group: list[Span] = []
    filled = 0
    for span in spans:
        size = limit if _is_row_group(span) else span.stop - span.start
        if group and filled + size > limit:
            yield group
            group, filled = [], 0
        group.append(span)
        filled += size
    if group:
        yield group


def read_part(part: Part, settings: PrepareSection, scratch: Path) -> Iterator[Document]:
    """Documents of a part, in order; objects of an object store lie in `scratch` meanwhile.

    Raises DataError naming file and offset.
    """
    for span in part.spans:
        check_unchanged(span)
        with _local_copy(span, scratch) as path:
            for text, offset in _read_span(span, path, settings):
                yield Document(text, f"{span.path}:{offset}", span.keep_whole)
        check_unchanged(span)


def _read_span(span: Span, path: Path, settings: PrepareSection) -> Iterator[tuple[str, int]]:
    start, stop = span.start, span.stop
    if span.kind == "parquet" and not _is_row_group(span):
        start, stop = 0, readers.parquet_row_groups(path)
    try:
        yield from readers.READERS[span.kind](path, start, stop, settings)
    except DataError as error:
        raise DataError(error.cause.replace(str(path), span.path), error.remedy) from None


@contextlib.contextmanager
def _local_copy(span: Span, scratch: Path) -> Iterator[Path]:
    if not span.path.startswith(s3.PREFIX):
        yield Path(span.path)
        return
    # The reader goes by the ending, so the copy keeps it.
    path = scratch / f"{os.getpid()}-{PurePosixPath(span.path).name}"
    s3.download(span.path, path)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _is_row_group(span: Span) -> bool:
    return span.kind == "parquet" and not span.path.startswith(s3.PREFIX)


def check_unchanged(span: Span) -> None:
    """Raises DataError when the file of a span is gone or is not the one that was planned with."""
    found = _state(span.path)
    if found is None:
        raise DataError(
            f"{span.path}: the source has gone since preparation began",
            "bring it back and run the command again; finished work is kept",
        )
    if found != (span.size, span.mtime_ns):
        raise DataError(
            f"{span.path}: the source has changed since preparation began ({span.size} bytes, now {found[0]})",
            "run the command again to start over with the new content",
        )


def _state(path: str) -> tuple[int, int] | None:
    """(size, time of last change) of a file or object, None when it is not there."""
    if path.startswith(s3.PREFIX):
        found = s3.describe(path)
        return (found.size, found.mtime_ns) if found else None
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
