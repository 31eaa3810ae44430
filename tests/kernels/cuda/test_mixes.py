"""From streams to one input: the kernels' own source on the CPU, against the other operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import mixes
from voltapile.kernels.cuda.launch import CudaWeight
from voltapile.kernels.families import MixWeights

from .emulation import has_compiler
from .test_families import REF, normal, plain, weights_of  # noqa: F401

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no g++")


def mix_of(ops: Any, name: str, width: int, low: int, injects: int) -> list[MixWeights]:
    """Ours and the reference's."""
    all_, names = 4 * width, ("norm", "down", "up", "inject")
    shapes = (all_,), (low, all_), (all_, low), (injects, all_)
    kinds = "F32", name, name, name
    made = [
        weights_of(ops, 0.2 * normal(i, *shape), kind) if shape[0] else (None, None)
        for i, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))
    ]
    return [MixWeights(**dict(zip(names, own, strict=True))) for own in zip(*made, strict=True)]


@pytest.mark.parametrize(
    ("name", "width", "low", "injects"),
    [
        *(("Q8_0", 320, 64, 4), ("Q8_0", 64, 96, 0), ("F16", 72, 40, 4), ("F32", 128, 32, 4)),
        *(("Q8_0", 256, 64, 4), ("Q8_0", 128, 512, 4)),  # one matrix in tiles; two
    ],
)
def test_streams_to_one(plain: Any, name: str, width: int, low: int, injects: int) -> None:  # noqa: F811
    """With and without what is added first; each row as it is alone."""
    mine, theirs = mix_of(plain, name, width, low, injects)
    assert mixes.fits(plain, mine, width)
    tokens = 11
    x, y, inject = normal(7, tokens, 4 * width), normal(8, tokens, width), normal(9, tokens, 4)
    for before in (None, (inject, y)):
        expected_x = x.copy()
        expected = REF.stream_in(expected_x, before, theirs, width, 1e-6)
        own_x = plain.array(x)
        own = None if before is None else tuple(plain.array(each) for each in before)
        found = plain.stream_in(own_x, own, mine, width, 1e-6)
        np.testing.assert_allclose(plain.to_host(own_x), expected_x, rtol=1e-6, atol=1e-6)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                scale = np.abs(other).max()
                np.testing.assert_allclose(plain.to_host(one), other, atol=3e-6 * scale)
        for t in (0, 9):
            own = None if before is None else tuple(plain.array(b[t : t + 1]) for b in before)
            alone = plain.stream_in(plain.array(x[t : t + 1]), own, mine, width, 1e-6)
            for one, other in zip(alone, found, strict=True):
                if one is not None:
                    np.testing.assert_array_equal(plain.to_host(one)[0], plain.to_host(other)[t])


def test_prompts_go_another_way(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Generated rows of a step keep their bits; rows of prompts are the reference's."""
    width, low = 64, 32
    mine, theirs = mix_of(plain, "F16", width, low, 4)
    x, y, inject = normal(7, 5, 4 * width), normal(8, 5, width), normal(9, 5, 4)
    expected = REF.stream_in(x.copy(), (inject, y), theirs, width, 1e-6)

    def run(rows: slice) -> tuple[Any, ...]:
        own = [plain.array(each[rows]) for each in (x, inject, y)]
        made = plain.stream_in(own[0], (own[1], own[2]), mine, width, 1e-6)
        return own[0], *made

    alone = run(slice(0, 2))
    with monkeypatch.context() as patch:
        patch.setattr(plain, "alone", 2)
        mixed = run(slice(0, 5))
    for one, other in zip(alone, mixed, strict=True):
        np.testing.assert_array_equal(plain.to_host(one), plain.to_host(other)[:2])
    for one, other in zip(mixed[1:], expected, strict=True):
        np.testing.assert_allclose(
            plain.to_host(one), other, atol=2e-3 * np.abs(other).max(), rtol=0
        )


def test_streams_are_added_to_late(plain: Any) -> None:  # noqa: F811
    """By the next mix of the same streams, or before anything else is launched; with the same bits.
    What is added may lie where the mix writes."""
    width, low, tokens = 64, 32, 3
    mine, _ = mix_of(plain, "F16", width, low, 4)
    values = normal(7, tokens, 4 * width), normal(9, tokens, 4), normal(8, tokens, width)
    x, inject, y = map(plain.array, values)
    expected = plain.stream_in(x, (inject, y), mine, width, 1e-6)

    def launched(since: int) -> list[str]:
        return [instance.function for instance, _, _ in plain.launched[since:]]

    for is_other in (False, True):
        own, other, since = plain.array(values[0]), plain.array(values[0]), len(plain.launched)
        assert plain.stream_add_(own, inject, y) is own
        assert launched(since) == []
        if is_other:
            plain.stream_in(other, None, mine, width, 1e-6)
            assert launched(since) == ["stream_add", "stream_down", "stream_up"]
            continue
        found = plain.stream_in(own, None, mine, width, 1e-6)
        assert launched(since) == ["stream_down", "stream_up"]
        for one, two in zip((own, *found), (x, *expected), strict=True):
            np.testing.assert_array_equal(plain.to_host(one), plain.to_host(two))

    own, since = plain.array(values[0]), len(plain.launched)
    outs = plain.array(values[2]), plain.array(values[1])
    mixes.stream_in(plain, own, (outs[1], outs[0]), mine, outs, 1e-6)
    assert launched(since) == ["stream_add", "stream_down", "stream_up"]
    for one, two in zip((own, *outs), (x, *expected), strict=True):
        np.testing.assert_allclose(plain.to_host(one), plain.to_host(two), rtol=2e-6, atol=2e-6)


def test_other_formats_do_not_fit(plain: Any) -> None:  # noqa: F811
    mine, _ = mix_of(plain, "Q8_0", 64, 32, 4)
    other, _ = mix_of(plain, "F16", 64, 32, 4)
    mixed = MixWeights(mine.norm, mine.down, other.up, mine.inject)
    assert mixes.fits(plain, mine, 64)
    assert not mixes.fits(plain, mixed, 64)
    assert not mixes.fits(plain, mine, 256 + 8)


@pytest.mark.parametrize(("arch", "largest"), [(70, 480), (75, 320), (90, 1152)])
def test_shared_memory_suffices(arch: int, largest: int) -> None:
    """For a wide model's streams, whose mixes have so many rows at most; 320 are usual."""
    card = SimpleNamespace(arch=arch, multiprocessors=72)

    def fits(low: int) -> bool:
        shapes = {"norm": (10240,), "down": (low, 10240), "up": (10240, low)}
        made = {
            key: CudaWeight(shape, 0, "F32" if len(shape) == 1 else "Q8_0", 0, 0)
            for key, shape in shapes.items()
        }
        return mixes.fits(card, MixWeights(**made, inject=None), 2560)

    assert fits(largest)
    assert not fits(largest + 32)
