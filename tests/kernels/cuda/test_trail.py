"""What comes behind a product is known the next time, and nothing else is taken for it."""

from __future__ import annotations

from typing import Any

import pytest
from voltapile.kernels.cuda.launch import Instance
from voltapile.kernels.cuda.trail import EARLY, LATE, Tiles, Trail

ASKING, NEXT, OTHER = Tiles(1000, 1 << 16, 8), Tiles(2000, 1 << 15, 5), Tiles(3000, 1 << 16, 9)


def launch(trail: Trail, product: Tiles, asks: bool = False) -> None:
    trail.note(product, asks)
    trail.add(0)


def test_what_comes_behind_is_learned_from_the_step_before() -> None:
    trail = Trail()
    assert not any(trail.behind(ASKING, True))
    for product in (NEXT, OTHER):  # also what comes there later
        launch(trail, ASKING, asks=True)
        launch(trail, product)
        launch(trail, Tiles(4000, 16, 1))
        found = product.ptr, product.nbytes, product.count
        early = min(EARLY, product.nbytes)
        assert trail.behind(ASKING, True) == (*found, early, min(LATE, product.nbytes - early))
        assert trail.behind(ASKING, False) == (*found, 0, min(LATE, product.nbytes))
    assert not any(trail.behind(OTHER, True))


def test_another_launch_between_keeps_it_unknown() -> None:
    trail = Trail()
    launch(trail, ASKING, asks=True)
    trail.add(0)
    launch(trail, NEXT)
    assert not any(trail.behind(ASKING, True))


def test_a_product_that_is_not_launched_is_no_launch() -> None:
    trail = Trail()
    trail.note(ASKING, asks=True)
    trail.note(NEXT, asks=False)
    assert not any(trail.behind(ASKING, True))


def test_a_rehearsal_teaches_what_comes_behind(
    fake_cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cupy.install(monkeypatch, fake_cupy.Gpu())
    from voltapile.kernels.cuda.device import Device
    from voltapile.kernels.cuda.loader import Loader

    card = Device(0)
    loader = Loader(card, None)
    monkeypatch.setattr("voltapile.kernels.cuda.loader.compile_all", lambda *_: [b""])
    with loader.rehearse():
        for product in (ASKING, NEXT):
            kernel = loader.kernel(Instance("a.cu", "a"))
            card.trail.note(product, product is ASKING)
            kernel((1,), 32, ())
    assert card.trail.behind(ASKING, False)[0] == NEXT.ptr
