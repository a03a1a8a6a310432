"""Unigram and bigram baselines: probabilities that sum to one, and perplexities that can be worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data.baselines import KneserNey, baseline_perplexities, count_pairs
from training.errors import DataError


def perplexities(train, held_out, vocab_size=10, pad=None):
    return baseline_perplexities([np.array(train)], [np.array(held_out)], vocab_size, pad)


@given(st.lists(st.lists(st.integers(0, 6), min_size=4, max_size=4), min_size=1, max_size=12))
def test_the_bigram_model_is_a_distribution(rows):
    keys, counts = count_pairs([np.array(rows)], 7, None)
    model = KneserNey(keys, counts, 7)
    probabilities = model.probability(np.arange(49)).reshape(7, 7)
    assert np.allclose(probabilities.sum(axis=1), 1.0) and (probabilities > 0).all()


def test_the_unigram_model_by_hand():
    # Predicted are 1, 1, 2: counts 2 and 1 of 3, add one over a vocabulary of 10.
    found = perplexities([[0, 1, 1, 2]], [[5, 1, 2]])
    assert found.predictions == 2
    assert found.unigram_perplexity == pytest.approx((13 / 3 * 13 / 2) ** 0.5)


def test_a_text_of_fixed_pairs_is_nearly_certain_for_the_bigram_model():
    rng = np.random.default_rng(0)
    follower = rng.permutation(50)
    rows = [[start, follower[start], follower[follower[start]]] for start in rng.integers(0, 50, 4000)]
    found = perplexities(rows[:3000], rows[3000:], 50)
    assert found.bigram_perplexity < 1.1
    assert found.unigram_perplexity > 40


def test_random_text_is_as_hard_as_its_vocabulary():
    rows = np.random.default_rng(1).integers(0, 20, (3000, 30))
    found = perplexities(rows[:2000], rows[2000:], 20)
    assert found.unigram_perplexity == pytest.approx(20, rel=0.01)
    assert found.bigram_perplexity == pytest.approx(20, rel=0.02)


def test_padding_is_not_predicted():
    plain = perplexities([[0, 1, 2, 1], [2, 1, 0, 1]], [[1, 2, 0, 1]])
    padded = perplexities([[0, 1, 2, 1, 9, 9], [2, 1, 0, 1, 9, 9]], [[1, 2, 0, 1, 9, 9]], pad=9)
    assert padded == plain


def test_blocks_add_up_to_the_same_counts():
    rows = np.random.default_rng(2).integers(0, 30, (100, 9))
    whole = count_pairs([rows], 30, None)
    pieces = count_pairs([rows[:10], rows[10:11], rows[11:]], 30, None)
    assert all(map(np.array_equal, whole, pieces))


def test_no_text_is_an_error():
    with pytest.raises(DataError, match="no tokens"):
        baseline_perplexities([], [np.array([[1, 2]])], 10)
