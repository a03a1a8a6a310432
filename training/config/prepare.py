"""The `prepare:` section: how text becomes a dataset.

Names and defaults of the quality rules are those of their sources: Gopher (Rae et al. 2021, arXiv 2112.11446, table A1
and appendix A.1.1) and C4 (Raffel et al. 2020, arXiv 1910.10683, section 2.2). Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from training.config.base import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section

Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
NGramRatios = tuple[tuple[PositiveInt, Ratio], ...]


class GopherQualitySection(Section):
    """Gopher's document rules: a document that breaks one is dropped."""

    enabled: bool = Field(True, description="Apply these rules.")
    min_doc_words: NonNegativeInt = Field(50, description="Fewest words of a document.")
    max_doc_words: PositiveInt = Field(100_000, description="Most words of a document.")
    min_avg_word_length: PositiveFloat = Field(3.0, description="Smallest mean word length in characters.")
    max_avg_word_length: PositiveFloat = Field(10.0, description="Largest mean word length in characters.")
    max_symbol_word_ratio: Ratio = Field(0.1, description="Most '#' and '...' (each) a word.")
    max_bullet_lines_ratio: Ratio = Field(0.9, description="Largest share of lines that start with a bullet.")
    max_ellipsis_lines_ratio: Ratio = Field(0.3, description="Largest share of lines that end with an ellipsis.")
    min_alpha_words_ratio: Ratio = Field(0.8, description="Smallest share of words with an alphabetic character.")
    min_stop_words: NonNegativeInt = Field(2, description="Fewest different stop words of `stop_words`.")
    stop_words: tuple[str, ...] = Field(
        ("the", "be", "to", "of", "and", "that", "have", "with"), description="Words that running text contains."
    )


class GopherRepetitionSection(Section):
    """Gopher's repetition rules: shares of a document that are repeats; a document above one is dropped."""

    enabled: bool = Field(True, description="Apply these rules.")
    dup_line_frac: Ratio = Field(0.3, description="Share of lines that are repeats of another line.")
    dup_para_frac: Ratio = Field(0.3, description="Share of paragraphs that are repeats of another paragraph.")
    dup_line_char_frac: Ratio = Field(0.2, description="Share of characters in repeated lines.")
    dup_para_char_frac: Ratio = Field(0.2, description="Share of characters in repeated paragraphs.")
    top_n_grams: NGramRatios = Field(
        ((2, 0.2), (3, 0.18), (4, 0.16)), description="[n, share of characters in the most frequent word n-gram]."
    )
    dup_n_grams: NGramRatios = Field(
        ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)),
        description="[n, share of characters in word n-grams that occur more than once].",
    )


class C4Section(Section):
    """C4's rules: they take lines out, and drop a document in which little is left. Meant for web pages."""

    enabled: bool = Field(False, description="Apply these rules.")
    filter_no_terminal_punct: bool = Field(True, description="Remove lines that end in no . ! ? or quotation mark.")
    min_words_per_line: NonNegativeInt = Field(3, description="Remove lines with fewer words.")
    min_num_sentences: NonNegativeInt = Field(5, description="Drop a document with fewer sentences.")
    filter_javascript: bool = Field(True, description="Remove lines that mention javascript.")
    filter_policy: bool = Field(True, description="Remove lines about cookies, privacy policy and terms of use.")
    filter_lorem_ipsum: bool = Field(True, description="Drop documents with the filler text lorem ipsum.")
    filter_curly_bracket: bool = Field(True, description="Drop documents that contain a curly bracket.")


class LanguageSection(Section):
    """Keep one language, told by the share of its most frequent words."""

    enabled: bool = Field(False, description="Apply this rule.")
    keep: tuple[Literal["de", "en", "es", "fr"], ...] = Field(("en",), description="Languages to keep.")
    min_function_word_ratio: Ratio = Field(
        0.1, description="Smallest share of words that are function words of the language."
    )


class DedupSection(Section):
    """Exact and near duplicates: of documents that are alike the first one stays."""

    exact: bool = Field(True, description="Drop documents whose text, white space and case aside, came before.")
    near: bool = Field(True, description="Drop documents that are nearly the same as one before (MinHash LSH).")
    num_perm: PositiveInt = Field(128, description="MinHash values a document.")
    threshold: Ratio = Field(0.8, description="Jaccard similarity of word n-grams from which two documents are alike.")
    n_gram: PositiveInt = Field(5, description="Words a shingle.")

    @model_validator(mode="after")
    def _bands_fit(self) -> DedupSection:
        if self.near and not 0.1 <= self.threshold <= 0.99:
            raise ValueError("threshold of near duplicates must lie between 0.1 and 0.99")
        return self


class PrepareSection(Section):
    """From text to shards (fab data.prepare)."""

    format: Literal["tfrecord", "hdf5"] = Field("tfrecord", description="Shard format.")
    compression: Literal["none", "gzip", "lzf"] = Field("none", description="Compression inside HDF5 shards.")
    tokenizer: str = Field("train", description="A tokenizer.json, or 'train' to train a byte-level BPE on the text.")
    vocab_size: PositiveInt = Field(65536, description="Entries of the trained tokenizer, special tokens included.")
    tokenizer_sample_bytes: PositiveInt = Field(
        200_000_000, description="Text the tokenizer is trained on, drawn evenly over the documents."
    )
    begin_token: str = Field("<|begin_text|>", description="Token that every document starts with.")
    pad_token: str = Field("<|pad|>", description="Token that fills sequences up (packing: best_fit only).")
    sequence_length: PositiveInt = Field(4096, description="Tokens the model sees at once; stored with one more.")
    packing: Literal["concatenate", "reference", "best_fit"] = Field(
        "concatenate",
        description="concatenate: cut the stream of documents; reference: sequences start with a document and what "
        "does not fit is dropped; best_fit: whole documents, padded.",
    )
    keep_whole: tuple[str, ...] = Field(
        (), description="packing reference: sources (as written with --source) of which nothing is dropped."
    )
    validation_fraction: Fraction = Field(0.01, description="Share of documents held out, chosen by document hash.")
    shard_bytes: PositiveInt = Field(256_000_000, description="Size at which a shard is closed.")
    part_bytes: PositiveInt = Field(64_000_000, description="Largest piece of input a worker takes at once.")
    workers: NonNegativeInt = Field(0, description="Worker processes; 0 takes one a CPU.")
    text_field: str = Field("text", description="Field of JSONL and column of Parquet that holds the text.")
    max_document_bytes: PositiveInt = Field(
        16_000_000, description="Plain text longer than this is cut at a line end; a longer line or record is an error."
    )
    invalid_utf8: Literal["error", "replace"] = Field(
        "error", description="What to do with bytes that are no UTF-8: stop, or replace them by U+FFFD."
    )
    fix_unicode: bool = Field(True, description="Repair mojibake, control characters and line ends (ftfy).")
    min_document_chars: NonNegativeInt = Field(1, description="Fewest characters of a document, rules aside.")
    quality: GopherQualitySection = Field(default_factory=GopherQualitySection)
    repetition: GopherRepetitionSection = Field(default_factory=GopherRepetitionSection)
    c4: C4Section = Field(default_factory=C4Section)
    language: LanguageSection = Field(default_factory=LanguageSection)
    dedup: DedupSection = Field(default_factory=DedupSection)


# The demo dataset: small vocabulary, short sequences; rules for prose are off, much of it is program text.
DEMO_SETTINGS: dict[str, object] = {
    "vocab_size": 2048,
    "sequence_length": 128,
    "validation_fraction": 0.05,
    "tokenizer_sample_bytes": 4_000_000,
    "min_document_chars": 200,
    "quality": {"enabled": False},
    "repetition": {"enabled": False},
}
