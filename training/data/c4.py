"""C4's rules (Raffel et al. 2020, arXiv 1910.10683, section 2.2), made for text taken from web pages."""

from __future__ import annotations

import re
from collections.abc import Callable

from training.config.prepare import C4Section
from training.data.textview import TextView

_TERMINAL = (".", "!", "?", '"', "”", "'", "’")
_SENTENCE_END = re.compile(r"[.!?][\"'”’)]*(?=\s|$)")
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


def c4_step(settings: C4Section) -> Callable[[TextView], tuple[str, str | None]]:
    """A function to the text without the lines that C4 removes, and the rule that drops the whole document or None."""

    def change(view: TextView) -> tuple[str, str | None]:
        lowered = view.text.lower()
        if settings.filter_lorem_ipsum and "lorem ipsum" in lowered:
            return "", "c4_lorem_ipsum"
        if settings.filter_curly_bracket and "{" in view.text:
            return "", "c4_curly_bracket"
        text = "\n".join(line for line in view.lines if _keeps(line, settings))
        if len(_SENTENCE_END.findall(text)) < settings.min_num_sentences:
            return text, "c4_min_num_sentences"
        return text, None

    return change


def _keeps(line: str, settings: C4Section) -> bool:
    if settings.filter_no_terminal_punct and (not line.endswith(_TERMINAL) or line.endswith("...")):
        return False
    if len(line.split()) < settings.min_words_per_line:
        return False
    lowered = line.lower()
    if settings.filter_javascript and "javascript" in lowered:
        return False
    return not (settings.filter_policy and any(phrase in lowered for phrase in _POLICY))
