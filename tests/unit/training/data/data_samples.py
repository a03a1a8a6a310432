"""Made-up text and settings that make small datasets of it."""

import random

from training.config.prepare import PrepareSection

WORDS = """
the be to of and that have with harbour boat water evening people pier stone weather month net year look hand pocket
light window river bread table morning letter garden winter road hill market small long quiet first
""".split()  # noqa: SIM905

# Short texts would not pass the rules for web pages; the rules have tests of their own.
SMALL = {
    "vocab_size": 400,
    "sequence_length": 16,
    "validation_fraction": 0.1,
    "workers": 1,
    "quality": {"enabled": False},
    "repetition": {"enabled": False},
}


def make_text(seed, words=60):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words)).capitalize() + ".\n"


def small_settings(**overrides):
    return PrepareSection.model_validate({**SMALL, **overrides})
