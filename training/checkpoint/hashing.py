"""A file that is hashed while it is written."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

from training.checkpoint.layout import FileEntry


class HashingFile(io.RawIOBase):
    """A file that is written from start to end and knows its size and sha256 when closed.

    `close` flushes it to the disk.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        # Unbuffered: torch.save hands over whole tensors.
        self._file = path.open("wb", buffering=0)
        self._digest = hashlib.sha256()
        self._size = 0

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any) -> int:
        """Writes all of `data` (a plain write may stop early) and adds it to the hash."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += self._file.write(view[done:])
        self._digest.update(view)
        self._size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Flushes to the disk and closes."""
        if not self._file.closed:
            try:
                os.fsync(self._file.fileno())
            finally:
                self._file.close()
        super().close()

    @property
    def entry(self) -> FileEntry:
        """Size and hash of what was written."""
        return FileEntry(self._size, self._digest.hexdigest())
