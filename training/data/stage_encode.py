"""Third stage, one part a task: tokens, sequences, shards. The held-out documents of all parts are packed together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from training.config.prepare import PrepareSection
from training.data.bpe import load_tokenizer, token_id
from training.data.files import atomic_file, sha256_of
from training.data.formats import ShardLayout, ShardWriter, TokenArray, get_format
from training.data.manifest import ShardEntry
from training.data.packing import TokenDocument, pack
from training.data.workfolder import CleanDocument, WorkFolder, read_documents, read_json, write_json

_BATCH_CHARS = 1_000_000
_WRITE_SEQUENCES = 4096


class EncodeTask(NamedTuple):
    """Everything a worker needs to encode one part."""

    part: int
    settings: PrepareSection
    work: WorkFolder
    tokenizer: Path


def is_held_out(content_hash: int, fraction: float) -> bool:
    """Whether a document belongs to the validation split: its own hash decides, so copies never straddle the splits."""
    return (content_hash >> 32) < fraction * 2**32


def is_in_tokenizer_sample(content_hash: int, fraction: float) -> bool:
    """Whether the tokenizer is trained on a document; independent of the split."""
    return (content_hash & 0xFFFFFFFF) < fraction * 2**32


def surviving_documents(work: WorkFolder, part: int) -> Iterator[CleanDocument]:
    """Documents of a part that cleaning and deduplication kept, in order."""
    verdicts = np.load(work.dropped(part))
    for document, verdict in zip(read_documents(work.clean(part, "docs")), verdicts, strict=True):
        if not verdict:
            yield document


def token_dtype(vocab_size: int) -> str:
    """Smallest storage type for token ids."""
    return "uint16" if vocab_size <= 65536 else "uint32"


def encode_part(task: EncodeTask) -> tuple[int, dict[str, Any]]:
    """Writes the training shards and the validation tokens of a part, unless that was done before.

    Returns the part with its counts and shards. Raises DataError, StorageError.
    """
    marker = task.work.encoded(task.part, "json")
    done = read_json(marker)
    if done is not None and _shards_are_there(task.work.out, done):
        return task.part, done
    counts = {"documents": 0, "bytes": 0, "tokens": 0, "validation_documents": 0}
    held_out: list[TokenDocument] = []
    documents = _training_documents(task, counts, held_out)
    shards = write_shards(documents, task.settings, task.work.out, f"train/{task.part:06d}", task.tokenizer)
    _write_validation(task.work.encoded(task.part, "validation"), held_out)
    done = {**counts, "shards": [shard._asdict() for shard in shards]}
    write_json(marker, done)
    return task.part, done


def _shards_are_there(out: Path, done: dict[str, Any]) -> bool:
    files = [(out / shard["file"], shard["bytes"]) for shard in done["shards"]]
    return all(path.is_file() and path.stat().st_size == size for path, size in files)


def _training_documents(
    task: EncodeTask, counts: dict[str, int], held_out: list[TokenDocument]
) -> Iterator[TokenDocument]:
    for document, tokens in _encoded(surviving_documents(task.work, task.part), task):
        counts["documents"] += 1
        counts["bytes"] += len(document.text.encode())
        counts["tokens"] += len(tokens)
        if is_held_out(document.hash, task.settings.validation_fraction):
            counts["validation_documents"] += 1
            held_out.append((tokens, document.keep_whole))
        else:
            yield tokens, document.keep_whole


def _encoded(documents: Iterable[CleanDocument], task: EncodeTask) -> Iterator[tuple[CleanDocument, npt.NDArray[Any]]]:
    """Each document with its token ids, the begin token first."""
    tokenizer, begin, _ = _tokenizer(task.tokenizer, task.settings)
    dtype = token_dtype(tokenizer.get_vocab_size())
    for batch in _batches(documents):
        encodings = tokenizer.encode_batch_fast([document.text for document in batch], add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            ids = encoding.ids
            tokens = np.empty(len(ids) + 1, dtype=dtype)
            tokens[0] = begin
            tokens[1:] = ids
            yield document, tokens


def _tokenizer(path: Path, settings: PrepareSection) -> tuple[Any, int, int]:
    """The tokenizer with its begin and pad token (-1: none). Loaded once a process and content."""
    return _load(path, sha256_of(path), settings.begin_token, settings.pad_token)


@lru_cache(maxsize=1)
def _load(path: Path, digest: str, begin_token: str, pad_token: str) -> tuple[Any, int, int]:
    tokenizer = load_tokenizer(path)
    # Text that happens to contain the spelling of a special token stays text.
    tokenizer.encode_special_tokens = True
    pad = tokenizer.token_to_id(pad_token)
    return tokenizer, token_id(tokenizer, begin_token, "begin_token"), -1 if pad is None else int(pad)


def _batches(documents: Iterable[CleanDocument]) -> Iterator[list[CleanDocument]]:
    batch: list[CleanDocument] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += len(document.text)
        if held >= _BATCH_CHARS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def write_shards(
    documents: Iterable[TokenDocument], settings: PrepareSection, out: Path, prefix: str, tokenizer: Path
) -> list[ShardEntry]:
    """Packs documents and writes them as shards `prefix`-00, -01, ... of at most about settings.shard_bytes."""
    model, _, pad = _tokenizer(tokenizer, settings)
    if settings.packing == "best_fit":
        pad = token_id(model, settings.pad_token, "pad_token")
    layout = ShardLayout(settings.sequence_length + 1, token_dtype(model.get_vocab_size()))
    sink = _ShardSink(settings, layout, out, prefix, pad if settings.packing == "best_fit" else None)
    try:
        for block in pack(documents, settings.packing, layout.tokens, layout.dtype, max(pad, 0)):
            sink.append(block)
        return sink.finish()
    except BaseException:
        sink.discard()
        raise


class _ShardSink:
    """Distributes sequences over shards of bounded size."""

    def __init__(self, settings: PrepareSection, layout: ShardLayout, out: Path, prefix: str, pad: int | None) -> None:
        self._format = get_format(settings.format)
        self._options = {"compression": settings.compression}
        self._layout, self._out, self._prefix, self._pad = layout, out, prefix, pad
        sequence_bytes = layout.tokens * np.dtype(layout.dtype).itemsize
        self._limit = max(1, settings.shard_bytes // sequence_bytes)
        self._entries: list[ShardEntry] = []
        self._writer: ShardWriter | None = None
        self._sequences = self._tokens = 0

    def append(self, block: TokenArray) -> None:
        """Adds sequences, beginning new shards as old ones fill up."""
        while len(block):
            if self._writer is None:
                self._writer = self._format.open_writer(self._out / self._name(), self._layout, self._options)
            room = min(self._limit - self._sequences, _WRITE_SEQUENCES)
            taken, block = block[:room], block[room:]
            self._writer.append(taken)
            self._sequences += len(taken)
            self._tokens += taken.size if self._pad is None else int((taken != self._pad).sum())
            if self._sequences >= self._limit:
                self._close()

    def finish(self) -> list[ShardEntry]:
        """Closes the last shard; returns all of them."""
        if self._writer is not None:
            self._close()
        return self._entries

    def discard(self) -> None:
        """Removes the unfinished shard."""
        if self._writer is not None:
            self._writer.discard()

    def _name(self) -> str:
        return f"{self._prefix}-{len(self._entries):03d}{self._format.suffix}"

    def _close(self) -> None:
        assert self._writer is not None
        size, digest = self._writer.close()
        self._entries.append(ShardEntry(self._name(), self._sequences, self._tokens, size, digest))
        self._writer = None
        self._sequences = self._tokens = 0


def _write_validation(path: Path, documents: list[TokenDocument]) -> None:
    tokens = [tokens for tokens, _ in documents]
    with atomic_file(path) as stream:
        np.save(stream, np.concatenate(tokens) if tokens else np.empty(0, dtype=np.uint16))
        np.save(stream, np.array([len(part) for part in tokens], dtype=np.int64))
        np.save(stream, np.array([keep for _, keep in documents], dtype=bool))


def validation_documents(work: WorkFolder, parts: Iterable[int]) -> Iterator[TokenDocument]:
    """Held-out documents of all parts, in order."""
    for part in parts:
        with work.encoded(part, "validation").open("rb") as stream:
            tokens, lengths, keep = (np.load(stream) for _ in range(3))
        starts = np.cumsum(lengths) - lengths
        for start, length, whole in zip(starts, lengths, keep, strict=True):
            yield tokens[start : start + length], bool(whole)
