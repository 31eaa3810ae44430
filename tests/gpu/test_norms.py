"""Norms that readers make themselves, on the GPU: the bits of one that is launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import matmul, norms, rows

from ..kernels.test_matmul import activations, random_raw

pytestmark = pytest.mark.gpu

EPS = 1e-6


@pytest.fixture(autouse=True)
def _scratch(cuda: Any) -> Iterator[None]:
    with cuda.scope():
        yield


def vector(cuda: Any, count: int, seed: int) -> Any:
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return cuda.weight(values.view(np.uint8), "F32", (count,))


@pytest.mark.parametrize("columns", [768, 2048, 4096, 5120, 8192])
@pytest.mark.parametrize("names", [("Q4_K",), ("Q6_K",), ("Q8_0",), ("Q4_K", "Q6_K", "Q4_K")])
def test_products_norm_with_the_same_bits(
    cuda: Any, put: Any, names: tuple[str, ...], columns: int
) -> None:
    """Of one to eight rows by the stream, and of more on the way to records."""
    weights = [
        cuda.weight(random_raw(name, 500 + 77 * i, columns, i), name, (500 + 77 * i, columns))
        for i, name in enumerate(names)
    ]
    biases = [vector(cuda, each.shape[0], 7) for each in weights]
    gain, many = vector(cuda, columns, 2), activations(64, columns)
    many = (many * np.logspace(-3, 2, 64)[:, None]).astype(np.float32)
    for tokens in (1, 2, 3, 5, 8, 9, 17, 64):
        with cuda.scope():
            x = put(many[:tokens])
            normed = rows.rms_norm(cuda, x, gain, EPS)
            apart = [cuda.to_host(out) for out in matmul.linears(cuda, normed, weights, biases)]
            late = norms.LateNorms().norm(cuda, x, gain, EPS)
            joined = [cuda.to_host(out) for out in matmul.linears(cuda, late, weights, biases)]
            for one, two in zip(joined, apart, strict=True):
                np.testing.assert_array_equal(one, two, f"{tokens} rows")
            np.testing.assert_array_equal(cuda.to_host(late), cuda.to_host(normed))
