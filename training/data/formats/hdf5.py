"""HDF5 shards: one dataset `input_ids` of shape [sequences, tokens], chunked by sequence, each chunk with a Fletcher-32
checksum that the library verifies when it reads; compression on demand.

h5py handles are for one process: a reader is opened in the worker that uses it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from training.data.files import sha256_of, storage_errors
from training.data.formats import ShardFormat, ShardLayout, TokenArray
from training.errors import DataError

SUFFIX = ".h5"
DATASET = "input_ids"
# A chunk is the unit of reading, checking and decompressing: several short sequences, or one long one.
_CHUNK_BYTES = 8192
_CHUNK_CACHE_BYTES = 1 << 20
_LIBRARY = ("v110", "v110")
_REMEDY = "fetch or prepare this shard again; fab data.verify lists every damaged shard"


class HDF5Writer:
    """ShardWriter for HDF5; see the protocol."""

    def __init__(self, path: Path, layout: ShardLayout, options: dict[str, Any]) -> None:
        self._path, self._layout = path, layout
        self._temporary = path.with_name(f".{path.name}.tmp")
        dtype = np.dtype(layout.dtype).newbyteorder("<")
        compression = options.get("compression", "none")
        rows = max(1, _CHUNK_BYTES // (layout.tokens * dtype.itemsize))
        with _write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = h5py.File(self._temporary, "w", libver=_LIBRARY)
            self._data = self._file.create_dataset(
                DATASET,
                shape=(0, layout.tokens),
                maxshape=(None, layout.tokens),
                dtype=dtype,
                chunks=(rows, layout.tokens),
                compression=None if compression == "none" else compression,
                fletcher32=True,
                track_times=False,
            )

    def append(self, sequences: TokenArray) -> None:
        """Adds rows of shape [count, tokens]. Raises StorageError."""
        start = len(self._data)
        with _write_errors(self._path):
            self._data.resize(start + len(sequences), axis=0)
            self._data[start:] = sequences

    def close(self) -> tuple[int, str]:
        """Finishes the file; returns its size in bytes and its sha256. Raises StorageError."""
        with _write_errors(self._path):
            self._file.close()
            with self._temporary.open("rb+") as stream:
                os.fsync(stream.fileno())
            digest = sha256_of(self._temporary)
            size = self._temporary.stat().st_size
            self._temporary.replace(self._path)
        return size, digest

    def discard(self) -> None:
        """Removes what was written."""
        with contextlib.suppress(OSError, RuntimeError):  # it could not be written, which is why it goes
            self._file.close()
        self._temporary.unlink(missing_ok=True)


class HDF5Reader:
    """ShardReader for HDF5; see the protocol. Checksums are verified by the library, whatever `verify` says."""

    def __init__(self, path: Path, layout: ShardLayout, verify: bool = True) -> None:
        self._path, self._layout = path, layout
        try:
            if not path.stat().st_size:
                raise DataError(f"{path}: the shard is empty (0 bytes)", _REMEDY)
            self._file = h5py.File(path, "r", rdcc_nbytes=_CHUNK_CACHE_BYTES, locking=False)
        except FileNotFoundError:
            raise DataError(f"{path}: the shard is missing", _REMEDY) from None
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"{path}: not a readable HDF5 file: {_one_line(error)}", _REMEDY) from None
        try:
            self._data = self._open_dataset()
            self._count = int(self._data.shape[0])  # h5py asks the library each time
        except BaseException:
            self._file.close()
            raise

    def _open_dataset(self) -> Any:
        try:
            data = self._file[DATASET]
            shape, dtype = getattr(data, "shape", None), getattr(data, "dtype", None)
        except (KeyError, OSError, RuntimeError, ValueError, TypeError) as error:
            raise DataError(f"{self._path}: no dataset {DATASET!r}: {_one_line(error)}", _REMEDY) from None
        if (
            shape is None
            or len(shape) != 2
            or shape[1] != self._layout.tokens
            or dtype is None
            or dtype.kind not in "ui"
        ):
            raise DataError(
                f"{self._path}: {DATASET} has shape {shape} and type {dtype}, "
                f"expected [sequences, {self._layout.tokens}] integers",
                _REMEDY,
            )
        return data

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> TokenArray:
        """Sequences start..stop-1, shape [stop - start, tokens]. Raises DataError."""
        self._check_range(start, stop)
        try:
            rows: TokenArray = self._data[start:stop]
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            raise self._bad_rows(range(start, stop), error) from None
        return self._typed(rows, start)

    def take(self, indices: Sequence[int], out: TokenArray | None = None) -> TokenArray:
        """The sequences at `indices`, shape [len(indices), tokens], in `out` if given. Raises DataError."""
        if len(indices):
            self._check_range(min(indices), max(indices) + 1)
        rows = np.empty((len(indices), self._layout.tokens), dtype=self._layout.dtype) if out is None else out
        for row, index in enumerate(indices):
            try:
                sequence = self._data[int(index)]
            except (OSError, RuntimeError, ValueError, MemoryError) as error:
                raise self._bad_rows(range(index, index + 1), error) from None
            rows[row] = self._typed(sequence, index)
        return rows

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(self):
            raise DataError(f"{self._path}: sequences {start}..{stop - 1} asked for, it has {len(self)}", _REMEDY)

    def _typed(self, rows: TokenArray, first: int) -> TokenArray:
        wanted = np.dtype(self._layout.dtype)
        if rows.dtype != wanted and rows.size:
            low, high = int(rows.min()), int(rows.max())
            if low < 0 or high > np.iinfo(wanted).max:
                raise DataError(
                    f"{self._path}: from record {first} on, a token is outside the range of {wanted}", _REMEDY
                )
        return rows.astype(wanted, copy=False)

    def _bad_rows(self, rows: range, error: Exception) -> DataError:
        """The first of `rows` that cannot be read, with the offset of its chunk."""
        for row in rows:
            try:
                self._data[row]
            except (OSError, RuntimeError, ValueError, MemoryError) as fault:
                try:
                    offset: Any = self._data.id.get_chunk_info_by_coord((row, 0)).byte_offset
                except (OSError, RuntimeError, ValueError, TypeError):
                    offset = "unknown"
                return DataError(f"{self._path}: record {row} at offset {offset}: {_one_line(fault)}", _REMEDY)
        return DataError(f"{self._path}: records {rows.start}..{rows.stop - 1}: {_one_line(error)}", _REMEDY)


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """storage_errors for h5py, which hides the error number in its text and also raises RuntimeError."""
    with storage_errors(path):
        try:
            yield
        except (OSError, RuntimeError) as error:
            number = errno.ENOSPC if "No space left" in str(error) else errno.EIO
            raise OSError(number, _one_line(error)) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


FORMAT = ShardFormat("hdf5", SUFFIX, HDF5Reader, HDF5Writer)
