"""From documents to sequences of equal length.

reference     the rule of the Huginn training data: documents are appended to a buffer; before the next one is appended,
              a buffer that holds a whole sequence gives its first one and the rest is dropped, so that sequences
              begin with a document, unless the last document is one to keep whole: then every whole sequence is cut
              and the remainder stays. At the end of the input what makes no whole sequence is dropped.
concatenate   the same with every document kept whole: only the end of the input can be lost.
best_fit      documents are cut to the sequence length, then each piece goes to the open sequence that it fills best
              (best fit decreasing; Ding et al. 2024, arXiv 2404.10830); the rest of a sequence is padding.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from training.data.formats import TokenArray

TokenDocument = tuple[npt.NDArray[Any], bool]
# Sequences are handed on in blocks of this many, so that memory stays small and calls stay few.
_BLOCK = 512
_BEST_FIT_WINDOW_TOKENS = 4_000_000


def pack(documents: Iterable[TokenDocument], rule: str, tokens: int, dtype: str, pad: int = 0) -> Iterator[TokenArray]:
    """Blocks [n, tokens] of packed sequences. `documents` are (token ids, keep whole) pairs, `rule` as above."""
    if rule == "best_fit":
        yield from _best_fit(documents, tokens, dtype, pad)
        return
    rows: list[TokenArray] = []
    for row in _reference(documents, tokens, keep_all=rule == "concatenate"):
        rows.append(row.reshape(-1, tokens))
        if len(rows) >= _BLOCK:
            yield np.concatenate(rows).astype(dtype)
            rows = []
    if rows:
        yield np.concatenate(rows).astype(dtype)


def _reference(documents: Iterable[TokenDocument], tokens: int, keep_all: bool) -> Iterator[npt.NDArray[Any]]:
    """Arrays whose size is a multiple of `tokens`."""
    parts: list[npt.NDArray[Any]] = []
    held = 0
    keep = False
    for document, keep_whole in documents:
        if held >= tokens:
            whole, parts, held = _cut(parts, tokens, keep)
            yield whole
        parts.append(document)
        held += len(document)
        keep = keep_all or keep_whole
    if held >= tokens:
        yield _cut(parts, tokens, keep)[0]


def _cut(
    parts: list[npt.NDArray[Any]], tokens: int, keep: bool
) -> tuple[npt.NDArray[Any], list[npt.NDArray[Any]], int]:
    buffer = np.concatenate(parts)
    if not keep:
        return buffer[:tokens], [], 0
    end = len(buffer) // tokens * tokens
    return buffer[:end], [buffer[end:]], len(buffer) - end


def _best_fit(documents: Iterable[TokenDocument], tokens: int, dtype: str, pad: int) -> Iterator[TokenArray]:
    window: list[npt.NDArray[Any]] = []
    held = 0
    for document, _ in documents:
        window.extend(document[start : start + tokens] for start in range(0, len(document), tokens))
        held += len(document)
        if held >= max(_BEST_FIT_WINDOW_TOKENS, 64 * tokens):
            yield _fill(window, tokens, dtype, pad)
            window, held = [], 0
    if window:
        yield _fill(window, tokens, dtype, pad)


def _fill(pieces: list[npt.NDArray[Any]], tokens: int, dtype: str, pad: int) -> TokenArray:
    bins: list[list[npt.NDArray[Any]]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, bin), sorted: the first one large enough fits best
    for piece in sorted(pieces, key=len, reverse=True):
        place = bisect.bisect_left(rooms, (len(piece), -1))
        if place < len(rooms):
            room, number = rooms.pop(place)
            bins[number].append(piece)
        else:
            room, number = tokens, len(bins)
            bins.append([piece])
        if room > len(piece):
            bisect.insort(rooms, (room - len(piece), number))
    block = np.full((len(bins), tokens), pad, dtype=dtype)
    for row, content in zip(block, bins, strict=True):
        joined = np.concatenate(content)
        row[: len(joined)] = joined
    return block
