"""The place where a number stopped being finite: computed again, or found in what was kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from voltapile.workers.protocol import Row

Make = Callable[..., Any]
IDS = list(range(40, 60))


@pytest.fixture(params=["reference", "cpu"])
def engine(request: pytest.FixtureRequest, mini: Path, engine_for: Make, drive: Make) -> Any:
    """With a prompt in slot 0, and its first token."""
    engine = engine_for(mini / "llama/model-f16.gguf", request.param)
    driver = drive(engine)
    driver.step(driver.start(0, IDS, 8))
    driver.step([Row(slot=0)])
    return engine


def poison(engine: Any, layer: int) -> None:
    keys = engine.caches.layers[layer].kv.keys
    page = engine.caches.tables[0][0, 0]
    keys[page] = np.nan if keys.dtype == np.float32 else 255


def test_nothing_is_wrong(engine: Any) -> None:
    assert engine.search.place(7, 0, len(IDS)) == "in the output head"
    engine.search.is_alone = False
    assert engine.search.place(7, 0, len(IDS)) == "after the keys and values of layer 3"


@pytest.mark.parametrize("layer", range(4))
def test_a_layer(engine: Any, layer: int) -> None:
    poison(engine, layer)
    assert engine.search.place(7, 0, len(IDS)) == f"in layer {layer}"


@pytest.mark.parametrize("layer", range(4))
def test_what_was_kept(engine: Any, layer: int) -> None:
    """Nothing is computed again: other layers' keys stay as they are."""
    poison(engine, layer)
    engine.search.is_alone = False
    first = f"first in the keys and values of layer {layer}"
    assert engine.search.place(7, 0, len(IDS)) == first
    for other in engine.caches.layers[layer + 1 :]:
        assert np.isfinite(np.asarray(other.kv.keys, np.float32)).all()


def test_what_another_rank_has_handed_on(engine: Any) -> None:
    engine.search.is_alone = False
    engine.search.share = msgspec.structs.replace(engine.search.share, embeds=False)
    poison(engine, 0)
    assert engine.search.place(7, 0, len(IDS)).endswith("layer 0 or before")


def test_a_rank_without_heads(engine: Any) -> None:
    engine.search.is_alone = False
    engine.search.share = msgspec.structs.replace(engine.search.share, head_map=[])
    assert "no keys" in engine.search.place(7, 0, len(IDS))
