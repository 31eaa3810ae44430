"""A token's q, k and v whose heads are normed, rotated and stored by the launch that makes them.

It is not launched when it is asked for: whether its rows are heads, and what becomes of them, is
known when the next call of Ops is. Knows neither cupy nor models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from voltapile.kernels.cuda import stream
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Launcher, Line
from voltapile.kernels.cuda.matmul import PLAIN, Launch, Policy, Product, matrix_args, pair_of
from voltapile.kernels.cuda.pages import CudaKv
from voltapile.kernels.cuda.streaming import streaming

Tail = Sequence[int | np.int32 | np.float32]


@dataclass(frozen=True)
class LateHeads:
    """outs: q, k and v. launch: as any product. join: with words to meet at (TICKETS zeros), and
    what rope_store is told of q and all else."""

    outs: tuple[DeviceArray, ...]
    launch: Callable[[Line], None]
    join: Callable[[int, Tail], None]

    def fits(self, arrays: Sequence[DeviceArray], cache: CudaKv) -> bool:
        """Whether these are its outs, in heads that its kernel takes."""
        dims = cache.key_dim, cache.value_dim
        is_whole = all(dim % stream.ROWS == 0 and dim <= stream.HEAD for dim in dims)
        is_own = all(a.ptr == b.ptr for a, b in zip(self.outs, arrays, strict=True))
        return is_own and is_whole and sum(each.size for each in arrays) <= len(cache.tickets)


def product_of(
    ops: Launcher,
    x: DeviceArray,
    weights: Sequence[CudaWeight],
    biases: Sequence[CudaWeight | None],
    policy: Policy,
) -> LateHeads | None:
    """None if it is not one token's, or not one launch that can go on with heads."""
    pair = pair_of({each.type_name for each in weights})
    is_row = len(x) == 1 and policy.way(1 - min(1, policy.generated)) == "rows"
    if len(weights) != 3 or not is_row or pair is None or ops.arch < stream.ARCH:
        return None
    outs = tuple(ops.scratch((1, weight.shape[0])) for weight in weights)
    q, k, v = (Product(*each) for each in zip(weights, biases, outs, strict=True))
    # Keys and values first: pages are looked up while others' last rounds go on.
    launch = Launch.of(ops, x, [k, v, q], PLAIN, pair)
    found = streaming(ops, x, launch.task)
    if found is None or found.deal.instance(pair) not in stream.HEADED:
        return None
    kind = found.deal.instance(pair)

    def launch_it(line: Line) -> None:
        found.launch(ops, kind, PLAIN, launch.others, launch.matrices, line)

    def join(words: int, tail: Tail) -> None:
        starts = accumulate((4 * each.size for each in outs[:2]), initial=words)
        posts = [
            replace(each, out=DeviceArray(start, each.out.shape, np.float32))
            for each, start in zip((q, k, v), starts, strict=True)
        ]
        matrices = matrix_args([posts[1], posts[2], posts[0]])
        found.launch(ops, stream.HEADED[kind], PLAIN, launch.others, matrices, (words, *tail))

    return LateHeads(outs, launch_it, join)
