"""Gopher's rules for documents (Rae et al. 2021, arXiv 2112.11446, appendix A.1.1): quality and repetition.

Where the paper leaves room: words are what white space separates; the first occurrence of a line, paragraph or n-gram
is no repeat; shares of characters count the characters of words or lines, not the white space between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from training.config.prepare import GopherQualitySection, GopherRepetitionSection
from training.data.textview import NGramGroups, TextView

# Names the rule that a document breaks, or None.
Rule = Callable[[TextView], "str | None"]

_BULLETS = ("•", "‣", "●", "*", "-")
_ELLIPSES = ("...", "…")
_LETTER = re.compile(r"[^\W\d_]")
_PUNCTUATION = ".,;:!?\"'()[]{}"


def quality_step(settings: GopherQualitySection) -> Rule:
    """Gopher's quality rules as one function; the cheap ones come first."""
    stop_words = frozenset(settings.stop_words)

    def find(view: TextView) -> str | None:
        count = len(view.words)
        if count < settings.min_doc_words:
            return "min_doc_words"
        if count > settings.max_doc_words:
            return "max_doc_words"
        mean = float(view.word_lengths.mean()) if count else 0.0
        if count and not settings.min_avg_word_length <= mean <= settings.max_avg_word_length:
            return "min_avg_word_length" if mean < settings.min_avg_word_length else "max_avg_word_length"
        return _symbol_rule(view, settings) or _line_rule(view, settings) or _word_rule(view, settings, stop_words)

    return find


def _symbol_rule(view: TextView, settings: GopherQualitySection) -> str | None:
    most = settings.max_symbol_word_ratio * len(view.words)
    ellipses = view.text.count("...") + view.text.count("…")
    return "max_symbol_word_ratio" if view.text.count("#") > most or ellipses > most else None


def _line_rule(view: TextView, settings: GopherQualitySection) -> str | None:
    lines = view.lines
    if sum(line.startswith(_BULLETS) for line in lines) > settings.max_bullet_lines_ratio * len(lines):
        return "max_bullet_lines_ratio"
    if sum(line.endswith(_ELLIPSES) for line in lines) > settings.max_ellipsis_lines_ratio * len(lines):
        return "max_ellipsis_lines_ratio"
    return None


def _word_rule(view: TextView, settings: GopherQualitySection, stop_words: frozenset[str]) -> str | None:
    words = view.words
    plain = sum(map(str.isalpha, words))
    least = settings.min_alpha_words_ratio * len(words)
    if plain < least:
        mixed = sum(1 for word in words if not word.isalpha() and _LETTER.search(word))
        if plain + mixed < least:
            return "min_alpha_words_ratio"
    if settings.min_stop_words and not _has_stop_words(words, stop_words, settings.min_stop_words):
        return "min_stop_words"
    return None


def _has_stop_words(words: Iterable[str], stop_words: frozenset[str], wanted: int) -> bool:
    found: set[str] = set()
    for word in words:  # running text has them within its first words
        plain = word.lower().strip(_PUNCTUATION)
        if plain in stop_words:
            found.add(plain)
            if len(found) >= wanted:
                return True
    return False


def repetition_step(settings: GopherRepetitionSection) -> Rule:
    """Gopher's repetition rules as one function."""

    def find(view: TextView) -> str | None:
        count, chars = repeated_share(view.lines)
        if count > settings.dup_line_frac:
            return "dup_line_frac"
        if chars > settings.dup_line_char_frac:
            return "dup_line_char_frac"
        count, chars = repeated_share([p for p in map(str.strip, view.text.split("\n\n")) if p])
        if count > settings.dup_para_frac:
            return "dup_para_frac"
        if chars > settings.dup_para_char_frac:
            return "dup_para_char_frac"
        return _n_gram_rule(view, settings)

    return find


def repeated_share(pieces: list[str]) -> tuple[float, float]:
    """Share of pieces, and of their characters, that occurred before."""
    seen: set[str] = set()
    repeats = repeated_chars = chars = 0
    for piece in pieces:
        chars += len(piece)
        if piece in seen:
            repeats += 1
            repeated_chars += len(piece)
        seen.add(piece)
    return (repeats / len(pieces), repeated_chars / chars) if pieces else (0.0, 0.0)


def _n_gram_rule(view: TextView, settings: GopherRepetitionSection) -> str | None:
    limits = [(n, limit, "top", top_n_gram_share) for n, limit in settings.top_n_grams]
    limits += [(n, limit, "dup", repeated_n_gram_share) for n, limit in settings.dup_n_grams]
    among: npt.NDArray[np.int64] | None = None
    for n, limit, name, share in sorted(limits, key=lambda entry: entry[0]):
        # A longer run can only come twice where the shorter one did.
        groups = view.repeated_n_grams(n, among)
        among = np.sort(groups.places)
        if share(view, n, groups) > limit:
            return f"{name}_{n}_gram"
    return None


def top_n_gram_share(view: TextView, n: int, groups: NGramGroups) -> float:
    """Share of the words' characters in the most frequent n-gram, if that occurs more than once."""
    if not groups.places.size or len(view.words) < 2 * n:
        return 0.0
    first = np.flatnonzero(~groups.repeat)
    counts = np.diff(np.append(first, len(groups.places)))
    most = int(counts.max())
    starts = groups.places[first[counts == most]]  # of several equally frequent ones the longest counts
    ends = np.cumsum(view.word_lengths)
    lengths = ends[starts + n - 1] - ends[starts] + view.word_lengths[starts]
    return float(lengths.max()) * most / float(ends[-1])


def repeated_n_gram_share(view: TextView, n: int, groups: NGramGroups) -> float:
    """Share of the words' characters that lie in an n-gram that occurred before; overlaps count once."""
    places = groups.places[groups.repeat]
    if not places.size:
        return 0.0
    edges = np.zeros(len(view.words) + 1, dtype=np.int64)
    np.add.at(edges, places, 1)
    np.add.at(edges, places + n, -1)
    covered = np.cumsum(edges[:-1]) > 0
    return float(view.word_lengths[covered].sum()) / float(view.word_lengths.sum())
