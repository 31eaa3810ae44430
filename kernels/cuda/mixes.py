"""Launcher of what few tokens take of their residual streams: two kernels, csrc/stream_in.cu.

For many tokens families.stream_in is made of products and passes over all streams. Takes a Launcher
and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda import streams
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.spread import spread
from voltapile.kernels.families import MixWeights
from voltapile.shm.formats import row_bytes

ROWS = {"Q8_0": 10, "F16": 10, "BF16": 10, "F32": 5}  # of a block of stream_down
STREAMS, EIGHT, PART = 4, 8, 32  # as in the source
TOKENS = 1, 8  # of a block
MOST_THREADS = 512
COLUMNS = 20  # the most that a block of stream_up takes: shared memory
GROUP = 4  # columns of it come in fours


def _instances(function: str) -> dict[tuple[str, int], Instance]:
    found = {}
    for name, rows in ROWS.items():
        for tokens in TOKENS:
            defines = (("FORMAT", name), ("ROWS", str(rows)), ("TOKENS", str(tokens)))
            found[name, tokens] = Instance("stream_in.cu", function, defines, waits=True)
    return found


DOWN, UP = _instances("stream_down"), _instances("stream_up")
INSTANCES = [*DOWN.values(), *UP.values()]


def fits(ops: Launcher, mix: MixWeights, width: int) -> bool:
    """Whether the kernels take these matrices; it does not depend on tokens."""
    down, up, inject = (_own(each) for each in (mix.down, mix.up, mix.inject or mix.down))
    name, columns = down.type_name, 32 if down.type_name == "Q8_0" else EIGHT
    return (
        {name, up.type_name, inject.type_name} <= {*ROWS} & {name}
        and down.shape[1] == STREAMS * width
        and width % columns == down.shape[0] % columns == 0
        and width <= EIGHT * MOST_THREADS
        and _deal(ops, name, width, down.shape[0]).shared_bytes(TOKENS[1]) <= max_shared(ops.arch)
    )


def stream_in(
    ops: Launcher,
    x: DeviceArray,
    before: tuple[DeviceArray, DeviceArray] | None,
    mix: MixWeights,
    outs: tuple[DeviceArray, DeviceArray | None],
    eps: float,
) -> None:
    """outs: [T, D]; [T, S] or nothing. Every row has the bits that it has alone. What comes before
    may lie where something else is made: then it is added first."""
    down, up, norm = (_own(each) for each in (mix.down, mix.up, mix.norm))
    out, injected = outs
    (tokens, width), low = out.shape, down.shape[0]
    injects = 0 if injected is None else injected.shape[1]
    assert x.shape == (tokens, STREAMS * width), (x, out)
    assert down.shape == (low, STREAMS * width), (down.shape, x)
    assert up.shape == (STREAMS * width, low), (up.shape, down.shape)
    assert norm.shape == x.shape[1:], (norm.shape, x)
    if not tokens:
        return
    inject = down if mix.inject is None else _own(mix.inject)
    assert mix.inject is None or not inject.is_tiled, inject.shape  # a row for each stream
    sizes = tokens, width, low, injects
    with ops.scope():
        parts = ops.scratch((tokens, STREAMS, low + injects))
        factors = ops.scratch((tokens, STREAMS))
        made = [each for each in (out, injected, parts, factors) if each is not None]
        if before is not None and not all(_are_apart(a, b) for a in before for b in made):
            streams.stream_add_(ops, x, *before)
            before = None
        added = (0, 0) if before is None else (before[0].ptr, before[1].ptr)
        read, found = (x.ptr, *added, norm.ptr), (parts.ptr, factors.ptr)
        _go_down(ops, (*read, down.ptr, inject.ptr, *found), down, sizes, eps)
        ends = out.ptr, 0 if injected is None else injected.ptr
        _come_up(ops, (*read, up.ptr, *found, *ends), up, sizes)


def _are_apart(one: DeviceArray, other: DeviceArray) -> bool:
    return bool(one.ptr + one.nbytes <= other.ptr or other.ptr + other.nbytes <= one.ptr)


def _go_down(
    ops: Launcher, pointers: tuple[int, ...], down: CudaWeight, sizes: tuple[int, ...], eps: float
) -> None:
    """sizes: tokens, their width, rank of the matrices, how many are injected to."""
    tokens, width, low, injects = sizes
    at_once, rows = TOKENS[tokens > 1], ROWS[down.type_name]
    numbers = np.float32(eps), np.float32(1) / np.float32(width), np.int32(down.is_tiled)
    ops.kernel(DOWN[down.type_name, at_once])(
        (STREAMS * (-(-low // rows) + -(-injects // rows)), -(-tokens // at_once)),
        32 * -(-width // (32 * EIGHT)),
        (*pointers, *map(np.int32, sizes), *numbers),
    )


def _come_up(
    ops: Launcher, pointers: tuple[int, ...], up: CudaWeight, sizes: tuple[int, ...]
) -> None:
    """sizes: as of _go_down."""
    tokens, width, low, _ = sizes
    at_once, deal = TOKENS[tokens > 1], _deal(ops, up.type_name, width, low)
    blocks, turns = -(-width // deal.columns), -(-tokens // at_once)
    numbers = *sizes, deal.columns, deal.staged
    ops.kernel(UP[up.type_name, at_once])(
        (blocks, turns),
        deal.threads,
        (*pointers, *map(np.int32, numbers), np.float32(1 / STREAMS), np.int32(up.is_tiled)),
        shared=max(deal.shared_bytes(at_once), spread(ops, blocks * turns, 0)),
    )


@dataclass(frozen=True)
class _Deal:
    """Of a block of stream_up. staged: bytes of its rows in shared memory."""

    low: int
    columns: int
    threads: int
    staged: int

    def shared_bytes(self, tokens: int) -> int:
        sums = -(-self.low // PART) * self.columns * STREAMS
        return self.staged + 4 * tokens * (self.low + sums)


def _deal(ops: Launcher, name: str, width: int, low: int) -> _Deal:
    columns = min(COLUMNS, GROUP * -(-width // (GROUP * ops.multiprocessors)))
    items = columns * STREAMS * -(-low // PART)
    turns = -(-items // MOST_THREADS)
    threads = 32 * -(-max(-(-items // turns), TOKENS[1] * columns) // 32)
    staged = columns * STREAMS * row_bytes(name, low) if name == "Q8_0" else 0
    return _Deal(low, columns, threads, -(-staged // 128) * 128)


def _own(weight: object) -> CudaWeight:
    assert isinstance(weight, CudaWeight)
    return weight
