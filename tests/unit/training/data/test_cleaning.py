"""Cleaning rules, one example each that they keep and one that they drop."""

import ftfy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.config.prepare import PrepareSection
from training.data.clean import Dropped, build_steps, clean, fix_unicode
from training.data.quality import repeated_n_gram_share, repeated_share, top_n_gram_share
from training.data.textview import TextView

PROSE = (
    "The harbour was quiet when the first boats came in, and nobody on the long stone pier had expected them back "
    "before the evening. A few people stood with their hands in their pockets and looked at the water. One laughed. "
    "It would be a good year, they said, if the weather held until the end of the month and the nets came up full."
)
PARAGRAPHS = [f"Paragraph number {i} tells of {i * 7} other things that have to be seen with care." for i in range(12)]


def verdict(text, **settings):
    result = clean(text, build_steps(PrepareSection.model_validate(settings)))
    return result.rule if isinstance(result, Dropped) else None


def test_prose_passes_every_default_rule():
    assert verdict(PROSE) is None
    assert verdict("\n\n".join(PARAGRAPHS), repetition={"enabled": False}) is None


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("min_doc_words", "Too short to be of use to the reader."),
        ("max_doc_words", PROSE * 1600),
        ("min_avg_word_length", "a b c to the of d e f g h i j k " * 5),
        ("max_avg_word_length", "incomprehensibilities counterrevolutionaries to the " * 15),
        ("max_symbol_word_ratio", PROSE + " #tag" * 20),
        ("max_symbol_word_ratio", PROSE.replace(" the", " ... the").replace(" a", " ... a")),
        ("max_bullet_lines_ratio", "\n".join(f"- {line}" for line in PARAGRAPHS)),
        ("max_ellipsis_lines_ratio", "\n".join(f"{line[:-1]}…" for line in PARAGRAPHS[:9])),
        ("min_alpha_words_ratio", PROSE + " 1024 77 3.5 12 99 8" * 5),
        ("min_stop_words", "lorem ipsum dolor sit amet consectetur adipiscing elit sed do " * 8),
        ("dup_line_frac", "\n".join([PROSE, *["Read more"] * 5])),
        ("dup_line_char_frac", "\n".join([PROSE, PROSE, *PARAGRAPHS[:5]])),
        ("dup_para_frac", "\n\n".join(PARAGRAPHS * 2)),
    ],
)
def test_each_rule_drops_its_case(rule, text):
    settings = {"repetition": {"dup_line_frac": 1.0, "dup_line_char_frac": 1.0}} if rule == "dup_para_frac" else {}
    if not rule.startswith("dup"):
        settings = {"repetition": {"enabled": False}}
    assert verdict(text, **settings) == rule


def test_repeated_n_grams_are_dropped_where_lines_differ():
    text = " ".join(f"number {i} please click here to subscribe to our weekly letter" for i in range(30))
    assert verdict(text, quality={"min_stop_words": 0}) in {"top_2_gram", "top_3_gram", "top_4_gram", "dup_5_gram"}


def test_rules_can_be_switched_off():
    off = {"quality": {"enabled": False}, "repetition": {"enabled": False}}
    assert verdict("x", **off) is None
    assert verdict("x", min_document_chars=2, **off) == "min_document_chars"


def share(function, view, n):
    groups = view.repeated_n_grams(n)
    if n > 2 and view.words:  # the places of shorter repeats are all that has to be looked at
        shorter = np.sort(view.repeated_n_grams(n - 1).places)
        assert all(map(np.array_equal, view.repeated_n_grams(n, shorter), groups))
    return function(view, n, groups)


def test_shares_of_repeats():
    assert repeated_share(["a", "bb", "a", "a"]) == (0.5, 2 / 5)
    assert repeated_share([]) == (0.0, 0.0)
    view = TextView("one two x one two y one two")  # the pair comes three times: 18 of 20 characters
    assert share(top_n_gram_share, view, 2) == pytest.approx(18 / 20)
    assert share(repeated_n_gram_share, view, 2) == pytest.approx(12 / 20)
    assert share(top_n_gram_share, TextView("all words differ here now"), 2) == 0.0


@given(st.lists(st.sampled_from(["ab", "cde", "f", "ghij"]), max_size=40), st.integers(2, 5))
def test_n_gram_shares_equal_a_plain_count(words, n):
    view = TextView(" ".join(words))
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    covered = {i + j for i, gram in enumerate(grams) if gram in grams[:i] for j in range(n)}
    chars = sum(map(len, words))
    expected = sum(len(words[i]) for i in covered) / chars if covered else 0.0
    assert share(repeated_n_gram_share, view, n) == pytest.approx(expected)
    most = max((grams.count(gram) for gram in grams), default=0)
    expected = 0.0
    if most > 1 and len(words) >= 2 * n:
        expected = most * max(sum(map(len, gram)) for gram in grams if grams.count(gram) == most) / chars
    assert share(top_n_gram_share, view, n) == pytest.approx(expected)


def test_c4_takes_lines_out_and_drops_pages():
    page = f"Home | About\nWe use cookies to improve this site.\n{PROSE}\nEnable javascript to see more of it.\nyes."
    off = {"quality": {"enabled": False}, "repetition": {"enabled": False}, "c4": {"enabled": True}}
    steps = build_steps(PrepareSection.model_validate({**off, "c4": {"enabled": True, "min_num_sentences": 3}}))
    assert clean(page, steps).text == PROSE
    assert verdict("Lorem ipsum dolor.", **off) == "c4_lorem_ipsum"
    assert verdict("if (x) { y(); }", **off) == "c4_curly_bracket"
    assert verdict("One short sentence stands alone here.", **off) == "c4_min_num_sentences"


def test_the_language_rule_keeps_one_language():
    settings = {"language": {"enabled": True}, "quality": {"enabled": False}, "repetition": {"enabled": False}}
    assert verdict(PROSE, **settings) is None
    german = "Der Hafen war still, als die ersten Boote kamen, und niemand auf dem langen Pier hatte sie erwartet."
    assert verdict(german, **settings) == "language"
    assert verdict(german, **{**settings, "language": {"enabled": True, "keep": ["de"]}}) is None
    assert verdict("0x1f 33 77", **settings) == "language"


MOJIBAKE = [
    "schÃ¶n",
    "â€œquotedâ€\x9d",
    "plain",
    "a\r\nb",
    "tab\there",
    "nul\x00byte",
    "&eacute;t&eacute;",
    "日本",
    "<b>&amp;",
]


@given(st.lists(st.sampled_from(MOJIBAKE), max_size=6), st.sampled_from([" ", "\n", "\n\n"]))
def test_the_short_cut_repairs_what_ftfy_repairs(pieces, between):
    text = between.join(pieces)
    assert fix_unicode(text) == ftfy.fix_text(text)


def test_n_gram_hashes_know_order_and_place():
    one, other = TextView("a b c d e f"), TextView("b a c d e f")
    assert one.n_gram_hashes(2)[2:].tolist() == other.n_gram_hashes(2)[2:].tolist()
    assert one.n_gram_hashes(2)[0] != other.n_gram_hashes(2)[0]
    assert len(TextView("a b").n_gram_hashes(5)) == 1 and len(TextView("").n_gram_hashes(5)) == 0
    assert len(np.unique(TextView(" ".join(map(str, range(5000)))).n_gram_hashes(3))) == 4998
