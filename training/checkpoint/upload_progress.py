"""What of an upload is done, noted beside the checkpoints so that it survives a crash."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from training.checkpoint import layout

PROGRESS_NAME = ".upload"


class UploadProgress:
    """The files and parts of one checkpoint that are in the store already."""

    def __init__(self, folder: Path, marker: bytes) -> None:
        self._path = folder.parent / PROGRESS_NAME / f"{folder.name}.json"
        self._lock = threading.Lock()
        self._state: dict[str, Any] = {"marker": marker.decode(), "done": [], "multipart": {}}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._path.read_text())
            if found["marker"] == self._state["marker"]:
                self._state = found

    @property
    def done(self) -> set[str]:
        """Names of the files that are in the store."""
        return set(self._state["done"])

    def finish(self, name: str) -> None:
        """Notes that a file is in the store."""
        with self._lock:
            self._state["done"].append(name)
            self._state["multipart"].pop(name, None)
            self._store()

    def begin(self, name: str, upload_id: str, part_bytes: int) -> None:
        """Notes the start of a multipart upload."""
        with self._lock:
            self._state["multipart"][name] = {"id": upload_id, "part_bytes": part_bytes, "parts": {}}
            self._store()

    def upload_id(self, name: str, part_bytes: int) -> str | None:
        """Returns the identity of an interrupted multipart upload with parts of this size."""
        found = self._state["multipart"].get(name)
        return found["id"] if found and found["part_bytes"] == part_bytes else None

    def part(self, name: str, number: int) -> str | None:
        """Returns the ETag of an uploaded part."""
        etag: str | None = self._state["multipart"][name]["parts"].get(str(number))
        return etag

    def add_part(self, name: str, number: int, etag: str) -> None:
        """Notes an uploaded part."""
        with self._lock:
            self._state["multipart"][name]["parts"][str(number)] = etag
            self._store()

    def _store(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        layout.write_file(self._path, json.dumps(self._state).encode())


def note_uploaded(folder: Path, marker: bytes) -> None:
    """Notes beside the checkpoints that this one is in the store."""
    notes = folder.parent / PROGRESS_NAME
    notes.mkdir(parents=True, exist_ok=True)
    layout.write_file(notes / f"{folder.name}.done", marker)
    (notes / f"{folder.name}.json").unlink(missing_ok=True)


def is_uploaded(folder: Path) -> bool:
    """Whether this very checkpoint is known to be in the store."""
    try:
        note = (folder.parent / PROGRESS_NAME / f"{folder.name}.done").read_bytes()
        return note == (folder / layout.COMMIT_NAME).read_bytes()
    except OSError:
        return False
