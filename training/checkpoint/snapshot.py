"""Copies of nested state in host memory, and their way to the disk."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.checkpoint.hashing import HashingFile
from training.checkpoint.layout import FileEntry

_IMMUTABLE = (str, bytes, int, float, bool, complex, type(None), torch.Size, torch.dtype, torch.device)


class HostCopier:
    """Copies nested state (dicts, lists, tuples, tensors) to the host, into buffers that the next copy uses again.

    Buffers are pinned when there is a GPU, so the copies of one file run without waiting for each other; call `finish`
    before the device state may change. A view is copied as itself, not as the storage that it shows a part of, and
    tensors that share memory (tied weights) share their copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._pinned = torch.cuda.is_available()
        self._key = ""
        self._count = 0
        self._seen: dict[tuple[Any, ...], Tensor] = {}

    def copy(self, key: str, state: Any) -> Any:
        """Returns a copy of `state`; the buffers belong to `key` and are overwritten by the next copy under it."""
        self._key, self._count, self._seen = key, 0, {}
        return self._copy(state)

    def finish(self) -> None:
        """Waits until all copies have arrived."""
        if self._pinned:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Gives the host memory back."""
        self._buffers.clear()

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if isinstance(value, _IMMUTABLE):
            return value
        if isinstance(value, dict):
            duplicate = copy.copy(value)
            for name, item in value.items():
                duplicate[name] = self._copy(item)
            return duplicate
        if type(value) in (list, tuple):
            return type(value)(self._copy(item) for item in value)
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        source = tensor.detach()
        identity = (source.device, source.data_ptr(), tuple(source.shape), source.stride(), source.dtype)
        if source.numel() and identity in self._seen:
            return self._seen[identity]
        slot = (self._key, self._count)
        self._count += 1
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._pinned)
            self._buffers[slot] = buffer
        buffer.copy_(source, non_blocking=self._pinned)
        self._seen[identity] = buffer
        return buffer


def write_object(path: Path, state: Any) -> FileEntry:
    """Writes `state` with torch.save, flushed to the disk; returns size and hash (of what was handed to the disk)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = HashingFile(path)
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # torch reports a failed write of the zip writer as its own error; the cause is what matters.
        cause = error.__cause__ or error.__context__
        if isinstance(cause, OSError):
            raise cause from None
        raise
    finally:
        file.close()
    return file.entry


def write_bytes(path: Path, data: bytes) -> FileEntry:
    """Writes `data`, flushed to the disk, and returns its size and hash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with HashingFile(path) as file:
        file.write(data)
    return file.entry


def write_all(folder: Path, files: Mapping[str, Any]) -> dict[str, FileEntry]:
    """Writes files (bytes as they are, other objects with torch.save) below `folder` and returns their entries."""
    return {
        name: write_bytes(folder / name, content)
        if isinstance(content, bytes)
        else write_object(folder / name, content)
        for name, content in files.items()
    }
