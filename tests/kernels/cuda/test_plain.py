"""Products with small matrices that are not quantised, from the kernel's own source on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import plain as products

from .emulation import has_compiler
from .test_families import REF, normal, plain, weights_of  # noqa: F401

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no g++")


@pytest.mark.parametrize(
    ("name", "columns", "rows"), [("F32", 320, (12, 3)), ("F16", 72, (7,)), ("F32", 8, (1, 2, 3))]
)
def test_plain_rows(plain: Any, name: str, columns: int, rows: tuple[int, ...]) -> None:  # noqa: F811
    made = [weights_of(plain, normal(i, n, columns), name) for i, n in enumerate(rows)]
    mine, theirs = zip(*made, strict=True)
    assert products.fits(mine)
    x = normal(9, 11, columns)

    def run(values: np.ndarray) -> list[np.ndarray]:
        outs = [plain.scratch((len(values), n)) for n in rows]
        products.products(plain, plain.array(values), mine, outs)
        return [plain.to_host(out) for out in outs]

    found = run(x)
    for own, weight in zip(found, theirs, strict=True):
        expected = REF.linear(x, weight)
        np.testing.assert_allclose(own, expected, atol=1e-5 * np.abs(expected).max())
    for one, other in zip(run(x[10:]), found, strict=True):
        np.testing.assert_array_equal(one[0], other[10])


def test_what_does_not_fit(plain: Any) -> None:  # noqa: F811
    wide, _ = weights_of(plain, normal(0, 2, 4104))
    odd, _ = weights_of(plain, normal(0, 2, 12))
    packed, _ = weights_of(plain, normal(0, 2, 64), "Q8_0")
    tall, _ = weights_of(plain, normal(0, 1025, 8))
    assert not any(products.fits([each]) for each in (wide, odd, packed, tall))
