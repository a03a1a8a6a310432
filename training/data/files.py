"""Files that are either complete or absent."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from training.errors import StorageError

_COPY_BYTES = 1 << 20


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns an OSError of a write to `path` into a StorageError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"no space left while writing {path}", "free space or choose another folder, then run the command again"
            ) from None
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}", "check the folder, its permissions and its file system"
        ) from None


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary neighbour of `path`; it takes the name only when everything was written and synced."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a whole file in one step. Raises StorageError."""
    with atomic_file(path) as stream:
        stream.write(content)


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file, read in pieces. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while piece := stream.read(_COPY_BYTES):
            digest.update(piece)
    return digest.hexdigest()
