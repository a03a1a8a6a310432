"""Cleaning: a document goes through a chain of steps; each changes its text or drops it with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from training.config.prepare import PrepareSection
from training.data.c4 import c4_step
from training.data.language import language_step
from training.data.quality import quality_step, repetition_step
from training.data.textview import TextView


@dataclass(frozen=True)
class Dropped:
    """The rule that drops a document."""

    rule: str


# A step returns None to keep the text, another text to go on with, or the rule that drops the document.
Step = Callable[[TextView], "str | Dropped | None"]

# What ftfy would change in plain ASCII: control characters, foreign line ends, HTML entities.
_ASCII_NEEDS_REPAIR = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]|&[a-zA-Z#]")


def build_steps(settings: PrepareSection) -> list[Step]:
    """The steps that the settings switch on, in order: repair first, then lines, then whole documents."""
    steps: list[Step] = []
    if settings.fix_unicode:
        steps.append(lambda view: fix_unicode(view.text))
    if settings.c4.enabled:
        steps.append(_as_step(c4_step(settings.c4)))
    minimum = settings.min_document_chars
    steps.append(lambda view: Dropped("min_document_chars") if len(view.text) < minimum else None)
    if settings.quality.enabled:
        steps.append(_as_rule(quality_step(settings.quality)))
    if settings.repetition.enabled:
        steps.append(_as_rule(repetition_step(settings.repetition)))
    if settings.language.enabled:
        steps.append(_as_rule(language_step(settings.language)))
    return steps


def clean(text: str, steps: list[Step]) -> TextView | Dropped:
    """The text after all steps, or the reason why the document goes."""
    view = TextView(text)
    for step in steps:
        result = step(view)
        if isinstance(result, Dropped):
            return result
        if result is not None and result != view.text:
            view = TextView(result)
    return view


def fix_unicode(text: str) -> str:
    """Repairs mojibake, control characters and line ends (ftfy).

    ftfy works line by line, so lines that cannot need it are spared its slow way.
    """
    if text.isascii() and not _ASCII_NEEDS_REPAIR.search(text):
        return text
    import ftfy

    config = ftfy.TextFixerConfig()
    repaired = []
    for line in _lines(text):
        if config.unescape_html and "<" in line:
            # ftfy's rule: from the first sign of HTML on, entities are part of the text.
            config = config._replace(unescape_html=False)
        needs_repair = not line.isascii() or _ASCII_NEEDS_REPAIR.search(line)
        repaired.append(ftfy.fix_text(line, config) if needs_repair else line)
    return "".join(repaired)


def _lines(text: str) -> list[str]:
    """Lines with their ends, cut at newlines only, which is where ftfy cuts."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + lines[-1:]


def _as_rule(find: Callable[[TextView], str | None]) -> Step:
    def step(view: TextView) -> Dropped | None:
        rule = find(view)
        return None if rule is None else Dropped(rule)

    return step


def _as_step(change: Callable[[TextView], tuple[str, str | None]]) -> Step:
    def step(view: TextView) -> str | Dropped:
        text, rule = change(view)
        return text if rule is None else Dropped(rule)

    return step
