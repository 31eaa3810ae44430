"""Launcher of what few tokens take of their residual streams: two kernels, csrc/stream_in.cu.

For many tokens families.stream_in is made of products and passes over all streams. Takes a Launcher
and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

import numpy as np
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


def fits(mix: MixWeights, width: int) -> bool:
    """Whether the kernels take these matrices; it does not depend on tokens."""
    down, up, inject = (_own(each) for each in (mix.down, mix.up, mix.inject or mix.down))
    name, columns = down.type_name, 32 if down.type_name == "Q8_0" else EIGHT
    return (
        {name, up.type_name, inject.type_name} <= {*ROWS} & {name}
        and down.shape[1] == STREAMS * width
        and width % columns == down.shape[0] % columns == 0
        and width <= EIGHT * MOST_THREADS
    )


def stream_in(
    ops: Launcher,
    x: DeviceArray,
    before: tuple[DeviceArray, DeviceArray] | None,
    mix: MixWeights,
    outs: tuple[DeviceArray, DeviceArray | None],
    eps: float,
) -> None:
    """outs: [T, D]; [T, S] or nothing. Every row has the bits that it has alone."""
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
    inject_before, y_before = (0, 0) if before is None else (each.ptr for each in before)
    name, at_once = down.type_name, TOKENS[tokens > 1]
    turns = -(-tokens // at_once)
    with ops.scope():
        parts = ops.scratch((tokens, STREAMS, low + injects))
        factors = ops.scratch((tokens, STREAMS))
        ops.kernel(DOWN[name, at_once])(
            (STREAMS * -(-(low + injects) // ROWS[name]), turns),
            32 * -(-width // (32 * EIGHT)),
            (
                *(x.ptr, inject_before, y_before, norm.ptr, down.ptr, inject.ptr),
                *(parts.ptr, factors.ptr),
                *map(np.int32, (tokens, width, low, injects)),
                np.float32(eps),
            ),
        )
        columns, threads, staged = _deal(name, width, low, ops.multiprocessors)
        pieces, rows = -(-low // PART), columns * STREAMS
        numbers = tokens, width, low, injects, columns, staged
        ops.kernel(UP[name, at_once])(
            (-(-width // columns), turns),
            threads,
            (
                *(x.ptr, inject_before, y_before, norm.ptr, up.ptr, parts.ptr, factors.ptr),
                *(out.ptr, 0 if injected is None else injected.ptr),
                *map(np.int32, numbers),
                np.float32(1 / STREAMS),
            ),
            shared=max(
                staged + 4 * at_once * (low + pieces * rows),
                spread(ops, -(-width // columns) * turns, 0),
            ),
        )


def _deal(name: str, width: int, low: int, processors: int) -> tuple[int, int, int]:
    """Columns and threads of a block of stream_up, and bytes of its rows in shared memory."""
    columns = min(COLUMNS, GROUP * -(-width // (GROUP * processors)))
    items = columns * STREAMS * -(-low // PART)
    turns = -(-items // MOST_THREADS)
    threads = 32 * -(-max(-(-items // turns), TOKENS[1] * columns) // 32)
    staged = columns * STREAMS * row_bytes(name, low) if name == "Q8_0" else 0
    return columns, threads, -(-staged // 128) * 128


def _own(weight: object) -> CudaWeight:
    assert isinstance(weight, CudaWeight)
    return weight
