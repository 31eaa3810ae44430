"""Scores of a prompt: which position each is about, and what is left out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from voltapile.workers.scoring import PromptScores, best

rng = np.random.default_rng(4)
LOGITS = rng.standard_normal((9, 30)).astype(np.float32)
TOKENS = rng.integers(0, 30, 9).astype(np.int32)


def expected(position: int, count: int) -> list[tuple[int, float]]:
    x = LOGITS[position - 1].astype(np.float64)
    x -= np.log(np.exp(x).sum())
    ids = [int(TOKENS[position]), *np.argsort(-x)[:count].tolist()]
    return [(i, pytest.approx(x[i], abs=1e-5)) for i in ids]


@pytest.mark.parametrize("cuts", [[0, 9], [0, 4, 9], [0, 1, 2, 3, 9]])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_rows_follow_each_other(cuts: list[int], count: int) -> None:
    scores = PromptScores(9, count)
    for start, end in itertools.pairwise(cuts):
        assert scores.needs(start)
        pieces = np.array_split(LOGITS[start:end], 2)
        scores.add(start, TOKENS[start:end], pieces)
    assert scores.found == [[]] + [expected(position, count) for position in range(1, 9)]


def test_generated_tokens_are_left_out() -> None:
    """A request that comes back brings them in the same row as its prompt's end."""
    scores = PromptScores(6, 1)
    scores.add(0, TOKENS, [LOGITS])
    assert len(scores.found) == 6
    assert not scores.needs(6)


def test_a_reused_prefix_has_no_scores() -> None:
    scores = PromptScores(9, 1)
    scores.add(4, TOKENS[4:], [LOGITS[4:]])
    assert scores.found == [[]] * 5 + [expected(position, 1) for position in range(5, 9)]


def test_the_best() -> None:
    values = np.array([1.0, 3.0, -np.inf, 3.0, 2.0])
    assert best(values, 0) == []
    assert best(values, 3) == [1, 3, 4]
    assert best(values, 99) == [1, 3, 4, 0]


@pytest.mark.parametrize("size", [3, 255, 256, 700, 5000])
@pytest.mark.parametrize("count", [1, 2, 20])
def test_the_best_of_many(size: int, count: int) -> None:
    rng = np.random.default_rng(size)
    for values in (rng.standard_normal(size), rng.integers(0, 4, size), np.zeros(size)):
        values = values.astype(np.float32)
        values[rng.random(size) < 0.3] = -np.inf
        order = sorted(range(size), key=lambda i: (-values[i], i))
        assert best(values, count) == [i for i in order[:count] if values[i] > -np.inf]
