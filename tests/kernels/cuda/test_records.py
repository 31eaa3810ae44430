"""Tokens as records: of a norm that is late, the bits of one that is launched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from voltapile.kernels.cuda import norms, records, rows
from voltapile.kernels.cuda.chunks import CHUNKS, max_shared
from voltapile.kernels.cuda.launch import DeviceArray
from voltapile.kernels.cuda.spread import RESERVED

from .emulation import EmulatedOps, has_compiler
from .test_fragments import ops_of
from .test_norms import EPS, names, residual, vector
from .test_resources import TABLE

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")


@pytest.mark.parametrize("pair", [("Q6_K", "Q6_K"), ("Q4_K", "Q8_0"), ("Q5_K", "Q6_K")])
@pytest.mark.parametrize("columns", [768, 4352])
@pytest.mark.parametrize("seating", [records.NONE, records.Seating(6, 16)], ids=["", "seated"])
def test_a_late_norm_is_made_on_the_way(
    folder: Path, pair: tuple[str, str], columns: int, seating: records.Seating
) -> None:
    ops = ops_of(90, folder)
    gain, x = vector(ops, columns, 2), residual(ops, 11, columns)
    found = []
    for first in (rows.rms_norm(ops, x, gain, EPS), norms.LateNorms().norm(ops, x, gain, EPS)):
        names(ops)
        made = records.made(ops, first, pair, has_both=True, seating=seating)
        assert names(ops) == ["norm_tokens" if found else "stage_tokens"]
        each = [written(ops, *one, first, seating) for one in zip(made, pair, strict=True)]
        found.append((*each, ops.to_host(first)))
        assert norms.late_norm(first) is None
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)
    assert names(ops) == []  # the normed rows are there


def written(
    ops: EmulatedOps, place: int, name: str, x: DeviceArray, seating: records.Seating
) -> np.ndarray:
    """What is written of records: halves, sums where the format has offsets, a scale. Of seated
    ones all, for what nobody writes is as scratch was."""
    if name not in records.FORMATS:
        assert place == 0
        return np.zeros(0, np.uint8)
    nbytes = seating.record_bytes(name, x.shape[1], len(x))
    parts = ops.to_host(DeviceArray(place, (nbytes // 576, 576), np.uint8))
    if seating.seats:
        return parts
    kept = slice(512, 544) if CHUNKS[name].has_offset else slice(0)
    return np.concatenate([parts[:, :512], parts[:, kept], parts[:, 544:548]], axis=1)


@pytest.mark.parametrize("pair", [("Q4_K", "Q4_K"), ("Q6_K", "Q6_K"), ("Q4_K", "Q6_K")])
def test_blocks_that_norm_find_room_side_by_side(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]
) -> None:
    """As many as are each multiprocessor's share, and no more, with what kernels hold anyway."""
    ops = ops_of(90, folder)
    monkeypatch.setattr(ops, "multiprocessors", 4)
    late = norms.LateNorms().norm(ops, residual(ops, 11, 768), vector(ops, 768, 2), EPS)
    records.made(ops, late, pair, has_both=True)
    [(instance, _, shared)] = ops.launched
    held = TABLE["sm_90"][instance.name][3] + shared + RESERVED
    assert (max_shared(90) + RESERVED) // held == 3


@pytest.mark.parametrize("columns", [512, 8448])
def test_other_norms_are_launched(folder: Path, columns: int) -> None:
    ops = ops_of(90, folder)
    gain, x = vector(ops, columns, 2), residual(ops, 9, columns)
    late = norms.LateNorms().norm(ops, x, gain, EPS)
    records.made(ops, late, ("Q4_K", "Q4_K"), has_both=False)
    assert names(ops)[-1] == "stage_tokens"
