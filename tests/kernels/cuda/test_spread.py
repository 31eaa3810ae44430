"""How much shared memory keeps blocks apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.spread import RESERVED, spread


def card(arch: int) -> Any:
    return SimpleNamespace(arch=arch, multiprocessors=132)


@pytest.mark.parametrize(("blocks", "each"), [(100, 1), (132, 1), (192, 2), (384, 3)])
@pytest.mark.parametrize("own", [0, 18688])
def test_only_the_share_fits(blocks: int, each: int, own: int) -> None:
    taken = own + spread(card(90), blocks, own) + RESERVED
    room = max_shared(90) + RESERVED
    assert taken * each <= room < taken * (each + 1)


def test_many_blocks_and_older_cards_are_left_alone() -> None:
    assert spread(card(90), 5 * 132, 0) == 0
    assert spread(card(80), 132, 0) == 0
    assert spread(card(90), 192, 100 << 10) == 0
