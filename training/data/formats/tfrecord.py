"""TFRecord shards: a sequence is one tf.train.Example with the feature `input_ids`.

Framing, from TensorFlow's record format: length (uint64, little-endian), masked crc32c of the length, payload, masked
crc32c of the payload; mask(c) = rotate_right(c, 15) + 0xa282ead8. We write the tokens as one bytes value (little-endian
`dtype`), so every record of a shard has the same size and the reader finds record i by multiplication. Files of other
programs are read too: records of any size, tokens as bytes or as int64 list.

Beside each shard lies a `.tfindex` of "offset length" lines, the side index that the PyPI `tfrecord` reader takes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from training.data.example import ExampleError, example_prefix, parse_tokens
from training.data.files import storage_errors, write_atomically
from training.data.formats import ShardFormat, ShardLayout, TokenArray
from training.errors import DataError

SUFFIX = ".tfrecord"
INDEX_SUFFIX = ".tfindex"
_HEADER_BYTES = 12
_FOOTER_BYTES = 4
_MASK_DELTA = 0xA282EAD8
_REMEDY = "fetch or prepare this shard again; fab data.verify lists every damaged shard"


def masked_crc32c(data: Any) -> int:
    """TFRecord's checksum of a bytes-like object."""
    return int(mask_crc(np.array([google_crc32c.value(data)], dtype=np.uint32))[0])


def mask_crc(crc: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """TFRecord's mask, elementwise; it keeps a checksum of data that contains checksums useful."""
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_MASK_DELTA)


def record_header(length: int) -> bytes:
    """The 12 bytes in front of a payload of `length` bytes."""
    size = length.to_bytes(8, "little")
    return size + masked_crc32c(size).to_bytes(4, "little")


class TFRecordWriter:
    """ShardWriter for TFRecord; see the protocol."""

    def __init__(self, path: Path, layout: ShardLayout, options: dict[str, Any]) -> None:
        self._path, self._layout = path, layout
        self._temporary = path.with_name(f".{path.name}.tmp")
        token_bytes = layout.tokens * np.dtype(layout.dtype).itemsize
        prefix = example_prefix(token_bytes)
        self._head = record_header(len(prefix) + token_bytes) + prefix
        self._stride = len(self._head) + token_bytes + _FOOTER_BYTES
        self._records = 0
        self._hash = hashlib.sha256()
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self._temporary.open("wb")

    def append(self, sequences: TokenArray) -> None:
        """Adds rows of shape [count, tokens]. Raises StorageError."""
        count = len(sequences)
        block = np.empty((count, self._stride), dtype=np.uint8)
        block[:, : len(self._head)] = np.frombuffer(self._head, dtype=np.uint8)
        tokens = np.ascontiguousarray(sequences, dtype=f"<{np.dtype(self._layout.dtype).str[1:]}")
        block[:, len(self._head) : -_FOOTER_BYTES] = tokens.view(np.uint8)
        crcs = _payload_crcs(block)
        block[:, -_FOOTER_BYTES:] = mask_crc(crcs).astype("<u4").view(np.uint8).reshape(count, 4)
        data = block.tobytes()
        self._hash.update(data)
        self._records += count
        with storage_errors(self._path):
            self._stream.write(data)

    def close(self) -> tuple[int, str]:
        """Finishes shard and side index; returns size in bytes and sha256 of the shard. Raises StorageError."""
        with storage_errors(self._path):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            starts = range(0, self._records * self._stride, self._stride)
            index = "".join(f"{start} {self._stride}\n" for start in starts)
            write_atomically(self._path.with_suffix(INDEX_SUFFIX), index.encode())
            self._temporary.replace(self._path)
        return self._records * self._stride, self._hash.hexdigest()

    def discard(self) -> None:
        """Removes what was written."""
        self._stream.close()
        self._temporary.unlink(missing_ok=True)


class TFRecordReader:
    """ShardReader for TFRecord; see the protocol. Maps the file into memory; nothing is copied to read a range."""

    def __init__(self, path: Path, layout: ShardLayout, verify: bool = True) -> None:
        self._path, self._layout, self._verify = path, layout, verify
        self._dtype = np.dtype(layout.dtype).newbyteorder("<")
        self._map, self._bytes = _map_file(path)
        self._offsets: npt.NDArray[np.int64] | None = None
        token_bytes = layout.tokens * self._dtype.itemsize
        prefix = example_prefix(token_bytes)
        self._head = np.frombuffer(record_header(len(prefix) + token_bytes) + prefix, dtype=np.uint8)
        self._head_bytes = self._head.tobytes()
        self._stride = len(self._head) + token_bytes + _FOOTER_BYTES
        count, rest = divmod(len(self._bytes), self._stride)
        if rest or not np.array_equal(self._bytes[: len(self._head)], self._head):
            self._offsets = _find_records(path, self._bytes)
            count = len(self._offsets)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> TokenArray:
        """Sequences start..stop-1, shape [stop - start, tokens]. Raises DataError."""
        self._check_range(start, stop)
        if self._offsets is not None:
            return self._parse_records(range(start, stop))
        block = self._bytes[start * self._stride : stop * self._stride].reshape(-1, self._stride)
        return self._tokens(block, np.arange(start, stop))

    def take(self, indices: Sequence[int], out: TokenArray | None = None) -> TokenArray:
        """The sequences at `indices`, shape [len(indices), tokens], in `out` if given. Raises DataError."""
        if len(indices):
            self._check_range(min(indices), max(indices) + 1)
        rows = np.empty((len(indices), self._layout.tokens), dtype=self._dtype) if out is None else out
        if self._offsets is not None:
            rows[:] = self._parse_records(indices)
            return rows
        target = rows.view(np.uint8)
        for row, index in enumerate(indices):
            target[row] = self._token_bytes(index)
        return rows

    def _token_bytes(self, index: int) -> npt.NDArray[np.uint8]:
        """Tokens of one record as bytes of the file. Few operations: this is the way of every random read."""
        start = index * self._stride
        stop = start + self._stride - _FOOTER_BYTES
        head = start + len(self._head)
        if self._map[start:head] != self._head_bytes:
            self._name_bad_record(index)
        if self._verify:
            crc = google_crc32c.value(self._bytes[start + _HEADER_BYTES : stop])
            masked = (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF
            if masked != int.from_bytes(self._map[stop : stop + _FOOTER_BYTES], "little"):
                self._name_bad_record(index)
        return self._bytes[head:stop]

    def close(self) -> None:
        """Lets go of file and memory."""
        self._bytes = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:  # an array that was handed out still looks at the file; the map goes with it
            return

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self._count:
            raise DataError(f"{self._path}: sequences {start}..{stop - 1} asked for, it has {self._count}", _REMEDY)

    def _tokens(self, block: npt.NDArray[np.uint8], indices: npt.NDArray[np.int64]) -> TokenArray:
        head = len(self._head)
        intact = (block[:, :head] == self._head).all(axis=1)
        if not intact.all():
            self._name_bad_record(int(indices[np.flatnonzero(~intact)[0]]))
        if self._verify:
            stored = np.ascontiguousarray(block[:, -_FOOTER_BYTES:]).view("<u4")[:, 0]
            wrong = np.flatnonzero(mask_crc(_payload_crcs(block)) != stored)
            if wrong.size:
                self._name_bad_record(int(indices[wrong[0]]))
        # No copy: rows of a range look into the file; whoever needs them elsewhere copies them anyway.
        tokens: TokenArray = block[:, head:-_FOOTER_BYTES].view(self._dtype)
        return tokens

    def _name_bad_record(self, index: int) -> None:
        offset = index * self._stride
        self._payload(offset, index)
        raise DataError(f"{self._path}: record {index} at offset {offset}: unexpected content", _REMEDY)

    def _parse_records(self, indices: Sequence[int]) -> TokenArray:
        assert self._offsets is not None
        rows = np.empty((len(indices), self._layout.tokens), dtype=self._dtype)
        for row, index in enumerate(indices):
            offset = int(self._offsets[index])
            where = f"{self._path}: record {index} at offset {offset}"
            try:
                tokens = parse_tokens(self._payload(offset, int(index)), self._dtype)
            except ExampleError as error:
                raise DataError(f"{where}: {error}", _REMEDY) from None
            if len(tokens) != self._layout.tokens:
                raise DataError(f"{where}: {len(tokens)} tokens, expected {self._layout.tokens}", _REMEDY)
            if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) <= np.iinfo(self._dtype).max:
                raise DataError(f"{where}: a token is outside the range of {self._layout.dtype}", _REMEDY)
            rows[row] = tokens
        return rows

    def _payload(self, offset: int, index: int) -> bytes:
        """Payload of the record at `offset`, its framing verified."""
        length = _record_length(self._path, self._bytes, offset, index)
        start = offset + _HEADER_BYTES
        payload = self._bytes[start : start + length].tobytes()
        stored = self._bytes[start + length : start + length + _FOOTER_BYTES].tobytes()
        if self._verify and masked_crc32c(payload) != int.from_bytes(stored, "little"):
            raise DataError(f"{self._path}: record {index} at offset {offset}: checksum of payload is wrong", _REMEDY)
        return payload


def _payload_crcs(block: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """crc32c of the payload of each row of whole records."""
    value = google_crc32c.value
    payloads = block[:, _HEADER_BYTES:-_FOOTER_BYTES]
    return np.fromiter((value(row) for row in payloads), dtype=np.uint32, count=len(block))


def _map_file(path: Path) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    try:
        with path.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DataError(f"{path}: the shard is missing", _REMEDY) from None
    except ValueError:
        raise DataError(f"{path}: the shard is empty (0 bytes)", _REMEDY) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}", "check the path and its permissions") from None
    return mapped, np.frombuffer(mapped, dtype=np.uint8)


def _record_length(path: Path, data: npt.NDArray[np.uint8], offset: int, index: int) -> int:
    where = f"{path}: record {index} at offset {offset}"
    header = data[offset : offset + _HEADER_BYTES].tobytes()
    if len(header) < _HEADER_BYTES:
        raise DataError(f"{where}: the file ends within the record's header", _REMEDY)
    if masked_crc32c(header[:8]) != int.from_bytes(header[8:], "little"):
        raise DataError(f"{where}: checksum of length is wrong", _REMEDY)
    length = int.from_bytes(header[:8], "little")
    if offset + _HEADER_BYTES + length + _FOOTER_BYTES > len(data):
        raise DataError(f"{where}: the file ends within the record ({length} bytes announced)", _REMEDY)
    return length


def _find_records(path: Path, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Offsets of all records of a file whose records differ in size, found by walking from header to header."""
    offsets: list[int] = []
    offset = 0
    while offset < len(data):
        length = _record_length(path, data, offset, len(offsets))
        offsets.append(offset)
        offset += _HEADER_BYTES + length + _FOOTER_BYTES
    return np.array(offsets, dtype=np.int64)


FORMAT = ShardFormat("tfrecord", SUFFIX, TFRecordReader, TFRecordWriter)
