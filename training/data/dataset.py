"""A prepared dataset, opened for reading: sequences by number, in constant memory whatever the number of shards."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training.data import s3
from training.data.files import sha256_of
from training.data.formats import ShardLayout, ShardReader, TokenArray, get_format
from training.data.manifest import FILE_NAME, Manifest, ShardEntry, read_manifest
from training.data.order import Int64Array, samples, windowed_samples
from training.data.staging import DEFAULT_CACHE, LocalFolder, ShardStore, StagedFolder, stage_head
from training.errors import DataError

MAX_OPEN_SHARDS = 128


class TokenDataset:
    """Sequences of one split of a prepared dataset.

    `dataset[i]` is an array of sequence_length + 1 token ids. Shards are opened when first read and the least recently
    used one is closed beyond `max_open_shards`; a process that was forked opens its own.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        split: str,
        *,
        store: ShardStore | None = None,
        shuffle_window_bytes: int | None = None,
        verify_checksums: bool = True,
        max_open_shards: int = MAX_OPEN_SHARDS,
    ) -> None:
        self.folder, self.manifest, self.split = folder, manifest, split
        self._shards = manifest.splits[split]
        counts = np.fromiter((shard.sequences for shard in self._shards), dtype=np.int64, count=len(self._shards))
        self._ends = np.cumsum(counts)
        self._starts = np.append(self._ends - counts, 0)
        self._format = get_format(manifest.format)
        self._layout = ShardLayout(manifest.sequence_length + 1, manifest.token_dtype)
        self._store = store or LocalFolder(folder)
        self._window = _window(len(self), self._shards, self._layout, shuffle_window_bytes)
        self._verify, self._max_open = verify_checksums, max_open_shards
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._owner = os.getpid()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> TokenArray:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        row: TokenArray = self.read(np.array([index % len(self)], dtype=np.int64))[0]
        return row

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_open": OrderedDict()}  # another process opens the shards for itself

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer that the shards were made with."""
        return self.folder / self.manifest.tokenizer_file

    @property
    def sequence_length(self) -> int:
        """Tokens a model sees at once: one less than a stored sequence."""
        return self.manifest.sequence_length

    @property
    def pad_token_id(self) -> int | None:
        """Id of padding, or None."""
        return self.manifest.pad_token_id

    def order(self, seed: int, epoch: int, positions: Int64Array) -> Int64Array:
        """Numbers of the sequences read at `positions` (0..len-1) of `epoch`: a pure function, see order.py."""
        if self._window is None:
            return samples(seed, epoch, positions, len(self))
        block, window_blocks = self._window
        return windowed_samples(seed, epoch, positions, len(self), block=block, window_blocks=window_blocks)

    def stage(self, indices: Int64Array) -> None:
        """Begins to fetch the shards that hold sequences `indices`, where shards have to be fetched."""
        if not isinstance(self._store, LocalFolder):
            numbers = np.unique(np.searchsorted(self._ends, indices, side="right"))
            self._store.stage(self._shards[number] for number in numbers.tolist())

    def read(self, indices: Int64Array) -> TokenArray:
        """The sequences numbered `indices`, shape [len(indices), sequence_length + 1]. Raises DataError."""
        shards = np.searchsorted(self._ends, indices, side="right")
        inside = (indices - self._starts[shards]).tolist()
        places: dict[int, list[int]] = {}
        for place, shard in enumerate(shards.tolist()):
            places.setdefault(shard, []).append(place)
        rows = np.empty((len(indices), self._layout.tokens), dtype=self._layout.dtype)
        for shard, wanted in places.items():
            reader = self._reader(shard)
            if len(wanted) == 1:  # usual where there are many shards: straight into its row
                reader.take([inside[wanted[0]]], rows[wanted[0] : wanted[0] + 1])
            else:
                rows[wanted] = reader.take([inside[place] for place in wanted])
        return rows

    def _open_shard(self, shard: ShardEntry) -> ShardReader:
        path = self._store.path(shard)
        try:
            return self._format.open_reader(path, self._layout, self._verify)
        except DataError:
            if path.exists() or isinstance(self._store, LocalFolder):
                raise
            # Another process made room in the cache between our two steps.
            return self._format.open_reader(self._store.path(shard), self._layout, self._verify)

    def blocks(self, sequences: int = 1024) -> Iterable[TokenArray]:
        """All sequences in storage order, `sequences` at a time (fewer at the end of a shard)."""
        for number, shard in enumerate(self._shards):
            for start in range(0, shard.sequences, sequences):
                yield self._reader(number).read(start, min(start + sequences, shard.sequences))

    def close(self) -> None:
        """Closes every open shard."""
        while self._open:
            self._open.popitem()[1].close()

    def _reader(self, number: int) -> ShardReader:
        if self._owner != os.getpid():  # an HDF5 handle must not be shared with the parent process
            self._open, self._owner = OrderedDict(), os.getpid()
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self._shards[number]
        reader = self._open_shard(shard)
        if len(reader) != shard.sequences:
            raise DataError(
                f"{self.folder / shard.file} holds {len(reader)} sequences, the manifest says {shard.sequences}",
                f"fab data.verify {self.folder} lists every shard that does not fit the manifest",
            )
        self._open[number] = reader
        if len(self._open) > self._max_open:
            self._open.popitem(last=False)[1].close()
        return reader


def _window(
    sequences: int, shards: Sequence[ShardEntry], layout: ShardLayout, window_bytes: int | None
) -> tuple[int, int] | None:
    """(sequences a block, blocks a window) of a windowed order; blocks are about as large as shards."""
    if window_bytes is None or not shards:
        return None
    block = max(1, sequences // len(shards))
    block_bytes = block * layout.tokens * np.dtype(layout.dtype).itemsize
    return block, max(1, window_bytes // block_bytes)


def open_dataset(
    path: str | Path,
    split: str = "train",
    *,
    verify_checksums: bool = True,
    shuffle_window_bytes: int | None = None,
    cache_dir: str | Path = DEFAULT_CACHE,
    cache_limit_bytes: int = 1_000_000_000_000,
) -> TokenDataset:
    """Opens `split` ("train" or "validation") of the dataset in folder `path`, or at an s3:// address.

    Reads the manifest only; shards are opened, and fetched, when they are read. Raises DataError when there is no such
    split, when the tokenizer beside the shards is not the one they were made with, or when the cache is too small.
    """
    store: ShardStore | None = None
    folder = Path(path)
    if str(path).startswith(s3.PREFIX):
        folder = stage_head(str(path), Path(cache_dir), (FILE_NAME,))
        stage_head(str(path), Path(cache_dir), (read_manifest(folder).tokenizer_file,))
        store = StagedFolder(str(path), folder, cache_limit_bytes)
    manifest = read_manifest(folder)
    if store is not None:
        _check_cache(manifest, split, cache_limit_bytes, shuffle_window_bytes)
    if not manifest.sequences(split):
        raise DataError(
            f"{folder} has no sequence in split {split!r} (splits: {', '.join(manifest.splits) or 'none'})",
            "prepare it again with more text, a shorter --seq-len or a larger validation_fraction",
        )
    check_tokenizer(folder / manifest.tokenizer_file, manifest)
    return TokenDataset(
        folder,
        manifest,
        split,
        store=store,
        shuffle_window_bytes=shuffle_window_bytes,
        verify_checksums=verify_checksums,
    )


def _check_cache(manifest: Manifest, split: str, limit: int, window: int | None) -> None:
    """A random order over more data than the cache holds would fetch every shard again and again."""
    total = sum(shard.bytes for shard in manifest.splits.get(split, ()))
    if total <= limit or (window is not None and 4 * window <= limit):
        return
    raise DataError(
        f"the dataset has {total} bytes, its local cache may have {limit} (data.cache_limit_bytes)",
        f"raise the limit, or read in windows: data.shuffle_window_bytes of at most {limit // 4}",
    )


def check_tokenizer(path: Path, manifest: Manifest) -> None:
    """Raises DataError unless `path` is the very tokenizer that the shards were made with."""
    try:
        found = sha256_of(path)
    except OSError as error:
        raise DataError(
            f"the tokenizer {path} cannot be read: {error.strerror}", "put the tokenizer of this dataset back"
        ) from None
    if found != manifest.tokenizer_sha256:
        raise DataError(
            f"{path} is not the tokenizer of these shards: its sha256 is {found[:12]}..., "
            f"the manifest says {manifest.tokenizer_sha256[:12]}...",
            "use the tokenizer the dataset was prepared with, or prepare the dataset again with this one",
        )


def label_mask(rows: npt.NDArray[np.int64], pad_token_id: int | None, ignore: int = -100) -> npt.NDArray[np.int64]:
    """Labels of rows [n, T + 1]: the tokens shifted by one, padding replaced by `ignore` (what cross entropy skips)."""
    labels = rows[:, 1:].copy()
    if pad_token_id is not None:
        labels[labels == pad_token_id] = ignore
    return labels
