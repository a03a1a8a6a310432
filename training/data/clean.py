"""Cleaning: a document goes through a chain of steps; each changes its text or drops it with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable

from training.config.prepare import PrepareSection

# A step returns the text to go on with, or the name of the rule that drops the document as `Dropped`.
Step = Callable[[str], "str | Dropped"]

_NEEDS_REPAIR_ASCII = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]|&[a-zA-Z#]")


class Dropped:
    """The rule that drops a document."""

    def __init__(self, rule: str) -> None:
        self.rule = rule


def build_steps(settings: PrepareSection) -> list[Step]:
    """The steps that the settings switch on, in order."""
    steps: list[Step] = []
    if settings.fix_unicode:
        steps.append(fix_unicode)
    minimum = settings.min_document_chars
    steps.append(lambda text: text if len(text) >= minimum else Dropped("min_document_chars"))
    return steps


def clean(text: str, steps: list[Step]) -> str | Dropped:
    """The text after all steps, or the reason why the document goes."""
    for step in steps:
        result = step(text)
        if isinstance(result, Dropped):
            return result
        text = result
    return text


def fix_unicode(text: str) -> str:
    """Repairs mojibake, control characters and line ends (ftfy); text that cannot need it is handed back at once."""
    if text.isascii() and not _NEEDS_REPAIR_ASCII.search(text):
        return text
    import ftfy

    return ftfy.fix_text(text)
