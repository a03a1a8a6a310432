"""A language filter without a model: the share of words that are function words of a language.

About a third to a half of the words of running text are among a language's few dozen most frequent ones, and these
hardly occur in other languages' text. Good enough to take other languages out; not meant to tell Danish from Norwegian.
"""

from __future__ import annotations

from collections.abc import Callable

from training.config.prepare import LanguageSection
from training.data.textview import TextView

FUNCTION_WORDS = {
    "en": "the of and to in a is that it for was on are as with be at by this have from or an not but which they you "
    "were his her she he we their has had been will would there if can when all what its one",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er "
    "hat dass sie nach wird bei einer um am sind noch wie einem über einen so zum war haben nur oder aber vor zur",
    "fr": "de la le et les des en un du une est que dans qui par pour au il sur ne pas plus ce se sont avec son aux "
    "ou sa ses mais comme cette ils elle nous vous leur été être fait tout même deux ces dont on",
    "es": "de la que el en y a los se del las un por con no una su para es al lo como más pero sus le ya o este sí "
    "porque esta entre cuando muy sin sobre también me hasta hay donde quien desde todo nos durante todos uno",
}
_SAMPLE_WORDS = 2000


def language_step(settings: LanguageSection) -> Callable[[TextView], str | None]:
    """A function that names the rule `language` for documents in none of the languages to keep."""
    lists = {language: frozenset(words.split()) for language, words in FUNCTION_WORDS.items()}

    def find(view: TextView) -> str | None:
        words = [word.lower().strip(".,;:!?\"'()[]«»“”") for word in view.words[:_SAMPLE_WORDS]]
        if not words:
            return "language"
        shares = {language: sum(word in known for word in words) / len(words) for language, known in lists.items()}
        best = max(shares, key=lambda language: shares[language])
        known_enough = shares[best] >= settings.min_function_word_ratio
        return None if known_enough and best in settings.keep else "language"

    return find
