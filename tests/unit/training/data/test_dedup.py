"""Duplicates: datasketch's signatures, keys compared on disk, the same verdict for any cut into parts and ranges."""

import random

import numpy as np
import pytest
from datasketch import MinHash
from hypothesis import given, settings
from hypothesis import strategies as st

from training.config.prepare import DedupSection
from training.data import stage_dedup
from training.data.minhash import band_count, band_keys, signature
from training.data.stage_clean import hash_text, write_keys
from training.data.stage_dedup import EXACT, NEAR, deduplicate
from training.data.textview import TextView
from training.data.workfolder import WorkFolder

SETTINGS = DedupSection()


def sentence(rng, words):
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(words))


def changed(text, rng, words):
    parts = text.split()
    for _ in range(words):
        parts[rng.randrange(len(parts))] = f"new{rng.randrange(5000)}"
    return " ".join(parts)


def test_signatures_are_datasketchs():
    view = TextView(sentence(random.Random(1), 300))
    sketch = MinHash(num_perm=SETTINGS.num_perm, hashfunc=int, scheme="affine32")
    for value in np.unique(view.n_gram_hashes(5) & np.uint64(0xFFFFFFFF)).tolist():
        sketch.update(value)
    assert np.array_equal(signature(view, SETTINGS), sketch.hashvalues)


def test_similar_texts_share_a_key_and_different_ones_do_not():
    rng = random.Random(2)
    close = far = 0
    for _ in range(40):
        text = sentence(rng, 400)
        keys = set(band_keys(TextView(text), SETTINGS).tolist())
        assert len(keys) == band_count(SETTINGS)
        close += bool(keys & set(band_keys(TextView(changed(text, rng, 3)), SETTINGS).tolist()))
        far += bool(keys & set(band_keys(TextView(changed(text, rng, 150)), SETTINGS).tolist()))
    assert close == 40 and far == 0


def test_case_and_white_space_make_no_other_document():
    assert hash_text(TextView("One  Two\n three")) == hash_text(TextView("one two three "))
    assert hash_text(TextView("one two")) != hash_text(TextView("one twothree"))


def verdicts(folder, parts, settings=SETTINGS):
    work = WorkFolder(folder)
    for number, part in enumerate(parts):
        views = [TextView(text) for text in part]
        write_keys(work, number, "exact", np.array([hash_text(view) for view in views], dtype=np.uint64)[:, None])
        near = np.array([band_keys(view, settings) for view in views], dtype=np.uint64)
        write_keys(work, number, "near", near.reshape(-1, band_count(settings)))
    deduplicate(work, [len(part) for part in parts], settings)
    return [verdict for number in range(len(parts)) for verdict in np.load(work.dropped(number)).tolist()]


def test_of_documents_that_are_alike_the_first_stays(tmp_path):
    rng = random.Random(3)
    text, other = sentence(rng, 300), sentence(rng, 300)
    near = changed(text, rng, 2)
    parts = [[text, other], [near, text.upper()], [other, sentence(rng, 300)]]
    assert verdicts(tmp_path / "a", parts) == [0, 0, NEAR, EXACT, EXACT, 0]
    off = DedupSection(exact=False, near=False)
    assert verdicts(tmp_path / "b", parts, off) == [0] * 6


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=20), st.data())
def test_the_verdict_depends_on_neither_parts_nor_ranges(tmp_path_factory, numbers, data):
    texts = [f"document {number} is about the number {number}" for number in numbers]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(texts)), max_size=3)))
    parts = [texts[a:b] for a, b in zip([0, *cuts], [*cuts, len(texts)], strict=True)]
    expected = [EXACT if number in numbers[:i] else 0 for i, number in enumerate(numbers)]
    old = stage_dedup.RANGE_ROWS
    stage_dedup.RANGE_ROWS = data.draw(st.sampled_from([1, 3, old]))
    try:
        found = verdicts(tmp_path_factory.mktemp("work"), parts, DedupSection(near=False))
    finally:
        stage_dedup.RANGE_ROWS = old
    assert found == expected


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="threshold"):
        DedupSection(threshold=0.0)
