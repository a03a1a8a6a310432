"""The tokenizer: byte-level BPE of Hugging Face tokenizers, trained here or loaded from a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.errors import UsageError

END_TOKEN = "<|end_text|>"
_MAX_TOKEN_CHARS = 32


def train_tokenizer(texts: Iterable[str], vocab_size: int, begin_token: str, pad_token: str) -> Tokenizer:
    """Trains a byte-level BPE: every digit is a token of its own, all 256 bytes are in the vocabulary.

    The result depends on the texts and their order alone. Fewer than `vocab_size` entries come out of little text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[begin_token, END_TOKEN, pad_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=_MAX_TOKEN_CHARS,
        min_frequency=2,
        show_progress=False,
    )
    if vocab_size < 256 + 3:
        raise UsageError(f"a vocabulary of {vocab_size} is too small", "byte-level BPE needs at least 259 entries")
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads a tokenizer.json. Raises UsageError."""
    if not path.is_file():
        raise UsageError(f"there is no tokenizer {path}", "name a tokenizer.json, or 'train'")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 (the library raises bare Exception for every fault of the file)
        raise UsageError(f"{path} is not a tokenizer.json: {error}", "write it with tokenizers' save()") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str, key: str) -> int:
    """Id of a special token; `key` is the setting that names it. Raises UsageError."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise UsageError(f"the tokenizer has no token {token!r}", f"set prepare.{key} to a token it has")
    return int(found)
