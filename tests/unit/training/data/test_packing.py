"""Packing rules: the worked example of the reference rule, and what each rule promises."""

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from training.data.packing import pack

GOLDEN = Path(__file__).parents[3] / "golden" / "packing.json"
Documents = st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30)


def pack_all(documents, rule, tokens, pad=0):
    blocks = list(pack(documents, rule, tokens, "uint16", pad))
    return np.concatenate(blocks) if blocks else np.empty((0, tokens), dtype=np.uint16)


def make(shapes):
    ends = np.cumsum([length for length, _ in shapes]) + 1
    return [
        (np.arange(end - length, end, dtype=np.uint16), keep)
        for end, (length, keep) in zip(ends.tolist(), shapes, strict=True)
    ]


def test_reference_rule_equals_the_worked_example():
    golden = json.loads(GOLDEN.read_text())
    documents = [(np.array(doc), keep) for doc, keep in zip(golden["docs"], golden["keep_all"], strict=True)]
    packed = pack_all(documents, "reference", golden["block_len_S_plus_1"])
    assert packed.tolist() == golden["blocks"]
    assert packed.size == golden["tokens_kept"]


@given(Documents, st.integers(2, 12))
def test_concatenate_loses_only_the_end(shapes, tokens):
    documents = make(shapes)
    stream = [token for doc, _ in documents for token in doc.tolist()]
    packed = pack_all(documents, "concatenate", tokens)
    assert packed.ravel().tolist() == stream[: len(stream) // tokens * tokens]


@given(Documents, st.integers(2, 12))
def test_reference_sequences_start_with_a_document_where_nothing_is_kept_whole(shapes, tokens):
    documents = [(doc, False) for doc, _ in make(shapes)]
    starts = {int(doc[0]) for doc, _ in documents}
    packed = pack_all(documents, "reference", tokens)
    assert all(int(row[0]) in starts for row in packed)
    assert all((np.diff(row.astype(int)) == 1).all() for row in packed)


@given(Documents, st.integers(2, 12))
def test_best_fit_keeps_every_token_and_cuts_only_long_documents(shapes, tokens):
    documents = make(shapes)
    packed = pack_all(documents, "best_fit", tokens, pad=0)
    kept = packed[packed != 0]
    assert sorted(kept.tolist()) == [token for doc, _ in documents for token in doc.tolist()]
    where = {int(token): row for row, content in enumerate(packed) for token in content if token}
    for doc, _ in documents:
        if len(doc) <= tokens:
            assert len({where[int(token)] for token in doc}) == 1
    assert len(packed) <= sum(-(-len(doc) // tokens) for doc, _ in documents)
