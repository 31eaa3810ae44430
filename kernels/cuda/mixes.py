"""Launcher of what few tokens take of their residual streams: two kernels, csrc/stream_in.cu.

For many tokens families.stream_in is made of products and passes over all streams. Takes a Launcher
and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

import numpy as np
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher
from voltapile.kernels.families import MixWeights
from voltapile.shm.formats import row_bytes

ROWS = {"Q8_0": 10, "F16": 10, "BF16": 10, "F32": 5}  # of a block of stream_down
STREAMS, TOKENS, EIGHT, PART = 4, 8, 8, 32  # as in the source
MOST_THREADS = 512
COLUMNS = 20  # the most that a block of stream_up takes: shared memory
GROUP = 4  # columns of it come in fours


def _instance(function: str, name: str, rows: int) -> Instance:
    defines = (("FORMAT", name), ("ROWS", str(rows)))
    return Instance("stream_in.cu", function, defines, waits=True)


DOWN = {name: _instance("stream_down", name, rows) for name, rows in ROWS.items()}
UP = {name: _instance("stream_up", name, rows) for name, rows in ROWS.items()}
INSTANCES = [*DOWN.values(), *UP.values()]


def fits(mix: MixWeights, width: int) -> bool:
    """Whether the kernels take these matrices; it does not depend on tokens."""
    down, up, inject = (_own(each) for each in (mix.down, mix.up, mix.inject or mix.down))
    name, columns = down.type_name, 32 if down.type_name == "Q8_0" else EIGHT
    return (
        {name, up.type_name, inject.type_name} <= {*ROWS} & {name}
        and down.shape[1] // width <= STREAMS
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
    count, injects = x.shape[1] // width, 0 if injected is None else injected.shape[1]
    assert x.shape == (tokens, count * width), (x, out)
    assert down.shape == (low, count * width), (down.shape, x)
    assert up.shape == (count * width, low), (up.shape, down.shape)
    assert norm.shape == x.shape[1:], (norm.shape, x)
    if not tokens:
        return
    inject = down if mix.inject is None else _own(mix.inject)
    inject_before, y_before = (0, 0) if before is None else (each.ptr for each in before)
    name, turns = down.type_name, -(-tokens // TOKENS)
    with ops.scope():
        parts = ops.scratch((tokens, count, low + injects))
        factors = ops.scratch((tokens, count))
        ops.kernel(DOWN[name])(
            (count * -(-(low + injects) // ROWS[name]), turns),
            32 * -(-width // (32 * EIGHT)),
            (
                *(x.ptr, inject_before, y_before, norm.ptr, down.ptr, inject.ptr),
                *(parts.ptr, factors.ptr),
                *map(np.int32, (tokens, width, count, low, injects)),
                np.float32(eps),
            ),
        )
        columns, threads, staged = _deal(name, width, count, low, ops.multiprocessors)
        pieces, rows = -(-low // PART), columns * count
        numbers = tokens, width, count, low, injects, columns, staged
        ops.kernel(UP[name])(
            (-(-width // columns), turns),
            threads,
            (
                *(x.ptr, inject_before, y_before, norm.ptr, up.ptr, parts.ptr, factors.ptr),
                *(out.ptr, 0 if injected is None else injected.ptr),
                *map(np.int32, numbers),
                np.float32(1 / count),
            ),
            shared=staged + 4 * TOKENS * (low + pieces * rows),
        )


def _deal(name: str, width: int, count: int, low: int, processors: int) -> tuple[int, int, int]:
    """Columns and threads of a block of stream_up, and bytes of its rows in shared memory."""
    columns = min(COLUMNS, GROUP * -(-width // (GROUP * processors)))
    items = columns * count * -(-low // PART)
    turns = -(-items // MOST_THREADS)
    threads = 32 * -(-max(-(-items // turns), TOKENS * columns) // 32)
    staged = columns * count * row_bytes(name, low) if name == "Q8_0" else 0
    return columns, threads, -(-staged // 128) * 128


def _own(weight: object) -> CudaWeight:
    assert isinstance(weight, CudaWeight)
    return weight
