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
    """outs: q, k and v. launch: as any product. join: with zeros to meet at, as many as there are
    values, and what its kernel is told of heads."""

    outs: tuple[DeviceArray, ...]
    launch: Callable[[Line], None]
    join: Callable[[int, Tail], None]

    def fits(self, arrays: Sequence[DeviceArray], cache: CudaKv, pairs: int) -> bool:
        """Whether these are its outs, in heads that its kernel takes, of so many pairs to turn."""
        dims = cache.key_dim, cache.value_dim, 2 * pairs
        is_own = all(a.ptr == b.ptr for a, b in zip(self.outs, arrays, strict=True))
        values = sum(each.size for each in arrays)
        return is_own and {*dims} == {stream.HEAD} and values <= len(cache.tickets)


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
    products = [k, v, q]  # the kernel's order
    launch = Launch.of(ops, x, products, PLAIN, pair)
    found = streaming(ops, x, launch.task)
    if found is None or found.deal.instance(pair) not in stream.HEADED:
        return None
    if found.deal.shared + stream.HEAD_BYTES > launch.task.most_shared:
        return None
    kind = found.deal.instance(pair)

    def launch_it(line: Line) -> None:
        found.launch(ops, kind, PLAIN, launch.others, launch.matrices, line)

    def join(words: int, tail: Tail) -> None:
        starts = accumulate((4 * each.out.size for each in products[:2]), initial=words)
        posts = [
            replace(each, out=DeviceArray(start, each.out.shape, np.float32))
            for each, start in zip(products, starts, strict=True)
        ]
        found.launch(ops, stream.HEADED[kind], PLAIN, launch.others, matrix_args(posts), tail)

    return LateHeads(outs, launch_it, join)
