"""Shard formats behind one protocol. A format is one module of this package with a constant `FORMAT`.

A shard holds sequences of equal length; a reader gives them back as rows of an integer array. Damage is a DataError
that names file and offset, never anything else.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from training.errors import UsageError

TokenArray = npt.NDArray[Any]


@dataclass(frozen=True)
class ShardLayout:
    """What a shard's sequences look like: `tokens` a sequence (sequence length + 1), stored as `dtype`."""

    tokens: int
    dtype: str


class ShardReader(Protocol):
    """Random access to the sequences of one shard. Not for use after a fork: open another one."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> TokenArray:
        """Sequences start..stop-1, shape [stop - start, tokens], checksums verified. Raises DataError.

        The array may be a read-only view of the file.
        """
        ...

    def take(self, indices: Sequence[int], out: TokenArray | None = None) -> TokenArray:
        """The sequences at `indices`, shape [len(indices), tokens], checksums verified, written to `out` if given.

        Raises DataError.
        """
        ...

    def close(self) -> None:
        """Lets go of file and memory."""
        ...


class ShardWriter(Protocol):
    """Writes one shard; it has its final name only after `close`."""

    def append(self, sequences: TokenArray) -> None:
        """Adds rows of shape [count, tokens]. Raises StorageError."""
        ...

    def close(self) -> tuple[int, str]:
        """Finishes the file; returns its size in bytes and its sha256. Raises StorageError."""
        ...

    def discard(self) -> None:
        """Removes what was written."""
        ...


@dataclass(frozen=True)
class ShardFormat:
    """A format: its name, the suffix of its files and how they are opened.

    `open_reader(path, layout, verify)` and `open_writer(path, layout, options)`; `verify` switches checksums.
    """

    name: str
    suffix: str
    open_reader: Callable[[Path, ShardLayout, bool], ShardReader]
    open_writer: Callable[[Path, ShardLayout, dict[str, Any]], ShardWriter]


def format_names() -> list[str]:
    """Names of the formats that are installed."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get_format(name: str) -> ShardFormat:
    """The format called `name`. Raises UsageError for one that is not there."""
    if name not in format_names():
        raise UsageError(f"there is no shard format {name!r}", f"use one of {', '.join(format_names())}")
    shard_format: ShardFormat = importlib.import_module(f"{__name__}.{name}").FORMAT
    return shard_format
