"""Shards of a dataset in an object store, brought to local disk ahead of use.

A shard is in the cache when its file has its final name: it was downloaded next to it, and its size and sha256 were
those of the manifest. All processes of a machine share one cache: a lock file a shard keeps two of them from fetching
the same one, and the shards used longest ago go when the limit is reached. A shard that is open stays readable after
it went.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from training.data import s3
from training.data.files import sha256_of, storage_errors
from training.data.manifest import ShardEntry
from training.errors import DataError, LoopworksError

DEFAULT_CACHE = "~/.cache/loopworks/datasets"
_DOWNLOADS = 4


class ShardStore(Protocol):
    """Where the files of shards are."""

    def path(self, shard: ShardEntry) -> Path:
        """Local path of a shard, fetched when it is not there. Raises DataError."""
        ...

    def stage(self, shards: Iterable[ShardEntry]) -> None:
        """Begins to fetch shards that will be needed; returns at once."""
        ...


class LocalFolder:
    """Shards on a local or shared file system: nothing to fetch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, shard: ShardEntry) -> Path:
        """Path of a shard."""
        return self._folder / shard.file

    def stage(self, shards: Iterable[ShardEntry]) -> None:
        """Does nothing."""


class StagedFolder:
    """Shards below an s3:// address, cached in `cache` up to `limit_bytes`."""

    def __init__(self, url: str, cache: Path, limit_bytes: int) -> None:
        self._url, self._cache, self._limit = url.rstrip("/"), cache, limit_bytes
        self._owner: int | None = os.getpid()
        self._pending: dict[str, Future[Path]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._guard = threading.Lock()

    def path(self, shard: ShardEntry) -> Path:
        """Local path of a shard, fetched when it is not there. Raises DataError, StorageError."""
        path = self._cache / shard.file
        with contextlib.suppress(OSError):
            os.utime(path)  # the time of last use, which decides what goes first
            return path
        return self._fetch(shard)

    def stage(self, shards: Iterable[ShardEntry]) -> None:
        """Begins to fetch shards in the background; an error shows when the shard is asked for."""
        if self._owner != os.getpid():  # the threads of the parent process are not in its child
            self._owner, self._pending, self._pool, self._guard = os.getpid(), {}, None, threading.Lock()
        for shard in shards:
            if (self._cache / shard.file).exists():
                continue
            with self._guard:
                if shard.file in self._pending:
                    continue
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(_DOWNLOADS, thread_name_prefix="stage")
                future = self._pool.submit(self._fetch, shard)
                self._pending[shard.file] = future
            future.add_done_callback(functools.partial(self._forget, shard.file))

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_owner": None, "_pending": {}, "_pool": None, "_guard": None}

    def _forget(self, name: str, _: Future[Path]) -> None:
        with self._guard:
            self._pending.pop(name, None)

    def _fetch(self, shard: ShardEntry) -> Path:
        path = self._cache / shard.file
        with _locked(path):
            if not path.exists():
                self._make_room(shard.bytes)
                s3.download(f"{self._url}/{shard.file}", path, lambda found: fault_of(found, shard))
        return path

    def _make_room(self, needed: int) -> None:
        if needed > self._limit:
            raise DataError(
                f"a shard of {needed} bytes is larger than data.cache_limit_bytes ({self._limit})", "raise the limit"
            )
        # A directory listing each time: other processes add and remove files too.
        files = sorted(_shard_files(self._cache))
        held = sum(size for _, size, _ in files)
        for _, size, entry in files:
            if held + needed <= self._limit:
                return
            entry.unlink(missing_ok=True)
            held -= size


def fault_of(path: Path, shard: ShardEntry) -> str | None:
    """What is wrong with a shard's file, None when size and sha256 are those of the manifest."""
    size = path.stat().st_size
    if size != shard.bytes:
        return f"{size} bytes, the manifest says {shard.bytes}"
    digest = sha256_of(path)
    if digest != shard.sha256:
        return f"sha256 is {digest[:12]}..., the manifest says {shard.sha256[:12]}..."
    return None


def _shard_files(cache: Path) -> Iterator[tuple[int, int, Path]]:
    """Yields time of last use in ns, size in bytes and path; what another process removes meanwhile is left out."""
    for split in cache.iterdir() if cache.is_dir() else ():
        for path in split.iterdir() if split.is_dir() else ():
            if not path.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    yield status.st_mtime_ns, status.st_size, path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = path.with_name(f".{path.name}.lock")
    with storage_errors(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        stream = lock.open("w")
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def stage_head(url: str, cache_dir: Path, names: Iterable[str]) -> Path:
    """Fetches the small files of a dataset (manifest, tokenizer) and returns its cache folder. Raises DataError."""
    folder = cache_dir.expanduser() / hashlib.blake2b(url.rstrip("/").encode(), digest_size=8).hexdigest()
    for name in names:
        try:
            s3.download(f"{url.rstrip('/')}/{name}", folder / name)
        except LoopworksError as error:
            raise DataError(f"{url} is not a prepared dataset, or not readable: {error.cause}", error.remedy) from None
    return folder
