"""Pooling: which rows count, however a prompt was cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from voltapile.workers.pooling import Pooled, pooling_of

HIDDEN = np.random.default_rng(5).standard_normal((9, 4)).astype(np.float32)
EXPECTED = {"mean": HIDDEN[:7].mean(axis=0), "first": HIDDEN[0], "last": HIDDEN[6]}


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.parametrize("cuts", [[0, 9], [0, 4, 9], [0, 1, 2, 6, 9]])
def test_rows_follow_each_other(kind: str, cuts: list[int]) -> None:
    """Behind the prompt there may be tokens that were generated."""
    pooled = Pooled(7, kind)
    for start, end in itertools.pairwise(cuts):
        if pooled.needs(start):
            pooled.add(start, HIDDEN[start:end])
    assert pooled.vector.dtype == np.float32
    np.testing.assert_allclose(pooled.vector, EXPECTED[kind], rtol=1e-6)


def test_a_prompt_that_begins_anew() -> None:
    pooled = Pooled(7, "mean")
    pooled.add(0, HIDDEN[:5])
    pooled.add(0, HIDDEN[:7])
    np.testing.assert_allclose(pooled.vector, EXPECTED["mean"], rtol=1e-6)


@pytest.mark.parametrize(("number", "kind"), [(0, "mean"), (1, "mean"), (2, "first"), (3, "last")])
def test_the_file_says_which(number: int, kind: str) -> None:
    assert pooling_of({"qwen3.pooling_type": number}, "qwen3") == kind
    assert pooling_of({"llama.pooling_type": number}, "qwen3") == "mean"
