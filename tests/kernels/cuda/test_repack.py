"""What a GPU makes of NVFP4 at load: its own format's values are the file's times the factor."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from voltapile.kernels.backend import describe
from voltapile.kernels.cuda import repack

from ..test_matmul import random_raw, values_of


@pytest.mark.parametrize("factors", [None, [0.375], [0.5, 2.0, 3.25]])
def test_values(monkeypatch: pytest.MonkeyPatch, factors: list[float] | None) -> None:
    monkeypatch.setattr(repack, "PIECE", 7)  # blocks; the last piece of each expert is shorter
    raw, scale = random_raw("NVFP4", 30, 192), None if factors is None else np.array(factors)
    pieces = list(repack.repacked(raw, "NVFP4", scale))
    assert max(len(each) for each in pieces) == 7 * 40
    found = values_of(np.concatenate(pieces), "NVFP4_SCALED", 30)
    expected = values_of(raw, "NVFP4", 30).reshape(len(factors or [1]), -1)
    expected = expected * np.array(factors or [1.0])[:, None]
    np.testing.assert_array_equal(found, expected.reshape(30, -1))


def test_a_plan_counts_what_is_uploaded() -> None:
    before, after = describe("cuda")["repacked"]["NVFP4"]
    assert (64, before) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.NVFP4]
    assert after == before + 4
