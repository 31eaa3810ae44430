"""Where a matrix's bytes go."""

from __future__ import annotations

import numpy as np
import pytest
from voltapile.kernels.cuda import tiles
from voltapile.shm.formats import row_bytes


@pytest.mark.parametrize("name", tiles.FORMATS)
def test_a_chunk_of_a_tile_is_contiguous(name: str) -> None:
    rows, columns = 48, 768
    each = row_bytes(name, columns)
    data = np.random.default_rng(1).integers(0, 256, (rows, each), np.uint8)
    made = np.ascontiguousarray(tiles.in_tiles(data.reshape(-1), name, columns)).reshape(-1)
    part = each // 3
    for row, chunk in ((0, 0), (5, 2), (16, 1), (47, 2)):
        at = row // 16 * 16 * each + chunk * 16 * part + row % 16 * part
        np.testing.assert_array_equal(
            made[at : at + part], data[row, chunk * part : (chunk + 1) * part]
        )


def test_what_is_whole_tiles() -> None:
    assert tiles.has_tiles("Q4_K", (32, 512))
    assert tiles.has_tiles("Q8_0", (8, 16, 256))
    assert not tiles.has_tiles("Q4_K", (40, 512))
    assert not tiles.has_tiles("Q8_0", (32, 288))
    assert not tiles.has_tiles("Q4_0", (32, 512))
    assert not tiles.has_tiles("Q8_0", (256,))
    assert not tiles.has_tiles("Q8_0", (16, 1 << 18))  # no piece of an upload has room for a tile
