"""Readers of source files, one function a kind: (path, start, stop, settings) -> (text, offset) pairs.

All of them hold at most one document, or one block of a few megabytes, in memory.
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import io
import json
import tokenize
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import IO, Any

from training.config.prepare import PrepareSection
from training.errors import DataError

Texts = Iterator[tuple[str, int]]
_KINDS = {".txt": "text", ".md": "text", ".rst": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_COMPRESSED = (".gz", ".zst")
SUFFIXES = (*_KINDS, *(f"{suffix}{packed}" for suffix in (".txt", ".jsonl") for packed in _COMPRESSED), ".parquet")
SPLITTABLE = frozenset({"text", "jsonl"})
_REMEDY_SOURCE = "repair or remove this file, then run the command again"


def kind_of(path: PurePath) -> str | None:
    """Name of the reader for a file, told by its ending; None when there is none."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return "parquet"
    if suffix in _COMPRESSED:
        inner = _KINDS.get(PurePath(path.stem).suffix.lower())
        return f"{inner}{suffix}" if inner else None
    return _KINDS.get(suffix)


def read_text(path: Path, start: int, stop: int, settings: PrepareSection) -> Texts:
    """A plain text file is one document; one larger than max_document_bytes is cut at line ends."""
    with _open(path) as stream:
        if start == 0 and stop <= settings.max_document_bytes:
            with _read_errors(path):
                data = stream.read(stop)
            if data:
                yield decode(data, path, 0, settings), 0
            return
        yield from _cut_text(stream, path, start, stop, settings)


def read_packed_text(path: Path, start: int, stop: int, settings: PrepareSection) -> Texts:
    """Compressed plain text; offsets count uncompressed bytes."""
    with _open(path) as stream:
        yield from _cut_text(stream, path, 0, None, settings)


def _cut_text(stream: IO[bytes], path: Path, start: int, stop: int | None, settings: PrepareSection) -> Texts:
    lines: list[bytes] = []
    begin = start
    held = 0
    for line, offset in _lines(stream, path, start, stop, settings):
        if lines and held + len(line) > settings.max_document_bytes:
            yield decode(b"".join(lines), path, begin, settings), begin
            lines, held = [], 0
        if not lines:
            begin = offset
        lines.append(line)
        held += len(line)
    if lines:
        yield decode(b"".join(lines), path, begin, settings), begin


def read_jsonl(path: Path, start: int, stop: int, settings: PrepareSection) -> Texts:
    """One JSON object a line; the text is in settings.text_field."""
    with _open(path) as stream:
        yield from _json_lines(stream, path, start, stop, settings)


def read_packed_jsonl(path: Path, start: int, stop: int, settings: PrepareSection) -> Texts:
    """Compressed JSON lines; offsets count uncompressed bytes."""
    with _open(path) as stream:
        yield from _json_lines(stream, path, 0, None, settings)


def _json_lines(stream: IO[bytes], path: Path, start: int, stop: int | None, settings: PrepareSection) -> Texts:
    for line, offset in _lines(stream, path, start, stop, settings):
        if line.isspace():
            continue
        try:
            record = json.loads(decode(line, path, offset, settings))
        except ValueError as error:
            raise DataError(f"{path}: line at offset {offset} is not valid JSON: {error}", _REMEDY_SOURCE) from None
        except RecursionError:
            raise DataError(f"{path}: line at offset {offset} is nested too deeply", _REMEDY_SOURCE) from None
        yield _text_of(record, path, f"line at offset {offset}", settings), offset


def _text_of(record: Any, path: Path, where: str, settings: PrepareSection) -> str:
    text = record.get(settings.text_field) if isinstance(record, dict) else None
    if isinstance(text, str):
        # JSON can escape half of a surrogate pair, which no encoding of text can hold.
        return text.encode("utf-8", "replace").decode() if not text.isascii() else text
    known = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
    raise DataError(
        f"{path}: {where} has no text in field {settings.text_field!r} (found: {known[:200]})",
        "name the field with prepare.text_field",
    )


def _lines(
    stream: IO[bytes], path: Path, start: int, stop: int | None, settings: PrepareSection
) -> Iterator[tuple[bytes, int]]:
    """Lines that begin in start..stop-1 (None: to the end), each with its offset.

    A line that began before `start` belongs to the piece before; the last one may end after `stop`.
    """
    limit = settings.max_document_bytes
    offset = start
    with _read_errors(path):
        if start:
            stream.seek(start - 1)
            while (line := stream.readline(limit)) and not line.endswith(b"\n"):
                offset += len(line)
                if stop is not None and offset >= stop:
                    return
            offset += len(line) - 1 if line else 0
        while stop is None or offset < stop:
            line = stream.readline(limit + 1)
            if not line:
                return
            if len(line) > limit and not line.endswith(b"\n"):
                raise DataError(
                    f"{path}: the line at offset {offset} is longer than {limit} bytes",
                    "break it up, or raise prepare.max_document_bytes",
                )
            yield line, offset
            offset += len(line)


def decode(data: bytes, path: Path, offset: int, settings: PrepareSection) -> str:
    """Text of UTF-8 bytes found at `offset`. Raises DataError naming the first byte that is none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if settings.invalid_utf8 == "replace":
            return data.decode("utf-8", "replace")
        raise DataError(
            f"{path}: invalid UTF-8 at offset {offset + error.start} ({error.reason})",
            "convert the file to UTF-8, or set prepare.invalid_utf8=replace",
        ) from None


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: the source has gone", "bring it back and run the command again") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}", _REMEDY_SOURCE) from None


@contextlib.contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    with _read_errors(path):
        raw: IO[bytes] = path.open("rb")
    with raw:
        if path.suffix.lower() == ".gz":
            yield io.BufferedReader(gzip.GzipFile(fileobj=raw), buffer_size=1 << 20)
        elif path.suffix.lower() == ".zst":
            yield io.BufferedReader(_ZstdFrames(raw), buffer_size=1 << 20)
        else:
            yield raw


class _ZstdFrames(io.RawIOBase):
    """Decompressed bytes of zstd frames. Unlike the library's own reader it takes no cut stream for a complete one."""

    # A block of zstd gives at most 128 KiB for 4 bytes: small pieces of input keep the output small.
    _PIECE_BYTES = 2048

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame: Any = None
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._advance():
            pass
        taken = min(len(buffer), len(self._ready))
        buffer[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken

    def _advance(self) -> bool:
        """Decompresses one more piece; False at the end of the input."""
        import zstandard

        self._packed = self._packed or self._raw.read(self._PIECE_BYTES)
        if not self._packed:
            if self._frame is not None:
                raise OSError("the compressed stream is cut off")
            return False
        self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
        try:
            self._ready = self._frame.decompress(self._packed)
        except zstandard.ZstdError as error:
            raise OSError(f"the compressed stream is damaged ({error})") from None
        self._packed = b""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
        return True


def parquet_row_groups(path: Path) -> int:
    """Number of row groups of a Parquet file. Raises DataError."""
    return int(_parquet(path).num_row_groups)


def read_parquet(path: Path, start: int, stop: int, settings: PrepareSection) -> Texts:
    """Rows of row groups start..stop-1; the offset is the row's number within the row group."""
    import pyarrow

    file = _parquet(path)
    if settings.text_field not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        raise DataError(
            f"{path}: no column {settings.text_field!r} (columns: {names[:200]})", "name it with prepare.text_field"
        )
    try:
        batches = file.iter_batches(batch_size=256, row_groups=range(start, stop), columns=[settings.text_field])
        row = 0
        for batch in batches:
            for text in batch.column(0).to_pylist():
                yield _text_of({settings.text_field: text}, path, f"row group {start}, row {row}", settings), row
                row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: row group {start} cannot be read: {error}", _REMEDY_SOURCE) from None


def _parquet(path: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except FileNotFoundError:
        raise DataError(f"{path}: the source has gone", "bring it back and run the command again") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}", _REMEDY_SOURCE) from None


def read_python(path: Path, start: int, stop: int, settings: PrepareSection) -> Texts:
    """A Python module as text; `pydoc_data/topics.py` gives the help texts that it holds, one document each."""
    with _read_errors(path):
        data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return  # a module in a made-up encoding is a test of the interpreter, not text
    if path.name == "topics.py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Dict):
                for value in node.values:
                    with contextlib.suppress(ValueError):
                        yield str(ast.literal_eval(value)), value.lineno
        return
    yield text, 0


READERS: dict[str, Callable[[Path, int, int, PrepareSection], Texts]] = {
    "text": read_text,
    "text.gz": read_packed_text,
    "text.zst": read_packed_text,
    "jsonl": read_jsonl,
    "jsonl.gz": read_packed_jsonl,
    "jsonl.zst": read_packed_jsonl,
    "parquet": read_parquet,
    "python": read_python,
}
