"""Shows what is in a dataset: decoded samples, lengths of documents, frequent tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from training.data.bpe import load_tokenizer
from training.data.dataset import TokenDataset, open_dataset
from training.data.manifest import read_manifest
from training.errors import UsageError

# Statistics come from this many sequences, spread evenly: enough for shares, quick on any dataset.
_STATISTICS_SEQUENCES = 2000


@dataclass(frozen=True)
class Statistics:
    """Of a sample of sequences: documents by length in tokens, most frequent tokens, share of padding."""

    sequences: int
    length_histogram: tuple[tuple[str, int], ...]
    top_tokens: tuple[tuple[int, float], ...]
    padding_ratio: float


def statistics(dataset: TokenDataset, sequences: int = _STATISTICS_SEQUENCES, top: int = 20) -> Statistics:
    """Reads `sequences` evenly spread sequences. A document's length is what of it lies in one sequence."""
    count = min(sequences, len(dataset))
    rows = dataset.read(np.linspace(0, len(dataset) - 1, count).astype(np.int64))
    pad = dataset.pad_token_id
    real = np.ones(rows.shape, dtype=bool) if pad is None else rows != pad
    frequencies = np.bincount(rows[real].astype(np.int64), minlength=1)
    order = np.argsort(-frequencies, kind="stable")[:top]
    total = max(int(real.sum()), 1)
    return Statistics(
        sequences=count,
        length_histogram=_histogram(_piece_lengths(rows, real, dataset.manifest.special_tokens.get("begin"))),
        top_tokens=tuple((int(token), float(frequencies[token]) / total) for token in order if frequencies[token]),
        padding_ratio=1 - total / max(rows.size, 1),
    )


def _piece_lengths(
    rows: np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]],
    real: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    begin: int | None,
) -> list[int]:
    lengths = []
    for row, filled in zip(rows, real, strict=True):
        end = int(filled.sum())
        starts = np.flatnonzero(row[:end] == begin).tolist() if begin is not None else []
        edges = sorted({0, *starts, end})
        lengths += [later - earlier for earlier, later in zip(edges, edges[1:], strict=False)]
    return lengths


def _histogram(lengths: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """Counts by powers of two."""
    if not lengths:
        return ()
    bits = np.bincount([length.bit_length() for length in lengths])
    return tuple((f"{1 << (bit - 1)}-{(1 << bit) - 1}", int(n)) for bit, n in enumerate(bits) if n)


def print_dataset(path: str | Path, console: Console, index: int | None = None, split: str = "train") -> None:
    """Prints an overview of the dataset, or sequence `index` of `split` decoded. Raises DataError, UsageError."""
    dataset = open_dataset(path, split)
    tokenizer = load_tokenizer(dataset.folder / dataset.manifest.tokenizer_file)
    if index is not None:
        if not 0 <= index < len(dataset):
            raise UsageError(
                f"there is no sequence {index} in split {split!r}", f"choose one from 0 to {len(dataset) - 1}"
            )
        _print_sequence(dataset, tokenizer, index, console)
        return
    _print_overview(dataset, console)
    found = statistics(dataset)
    table = Table("tokens of a document in a sequence", "documents", box=None)
    for span, count in found.length_histogram:
        table.add_row(span, f"{count:,}")
    console.print(table)
    shown = "  ".join(f"{escape(repr(tokenizer.decode([t], False)))} {share:.1%}" for t, share in found.top_tokens)
    console.print(f"most frequent tokens: {shown}")
    console.print(f"from {found.sequences:,} sequences; padding {found.padding_ratio:.1%}")
    for number in (0, len(dataset) // 2):
        _print_sequence(dataset, tokenizer, number, console, characters=300)


def _print_overview(dataset: TokenDataset, console: Console) -> None:
    manifest = read_manifest(dataset.folder)
    table = Table("split", "shards", "sequences", "tokens", "bytes", box=None)
    for split, shards in manifest.splits.items():
        size = sum(shard.bytes for shard in shards)
        counts = (len(shards), manifest.sequences(split), manifest.tokens(split), size)
        table.add_row(split, *(f"{count:,}" for count in counts))
    console.print(table)
    console.print(
        f"{manifest.format}, sequences of {manifest.sequence_length} + 1 tokens ({manifest.token_dtype}), "
        f"vocabulary {manifest.vocab_size:,}"
    )


def _print_sequence(
    dataset: TokenDataset, tokenizer: object, index: int, console: Console, characters: int | None = None
) -> None:
    text = tokenizer.decode(dataset[index].tolist(), skip_special_tokens=False)  # type: ignore[attr-defined]
    console.rule(f"{dataset.split} {index}", align="left")
    console.print(text[:characters], markup=False, highlight=False)
