"""A product of few rows that is this rank's part of a sum, and sends what it makes to all ranks.

Or what ends with one, as chosen experts do: their last launch.

It is not launched when it is asked for: whether it shall send is known when its sum is. Knows
neither cupy nor which ranks there are (group.line_of tells a kernel).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from voltapile.kernels.cuda import stream
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Launcher, Line
from voltapile.kernels.cuda.matmul import ADD, PLAIN, Launch, Product, streamed
from voltapile.kernels.cuda.norms import late_norm


@dataclass(frozen=True)
class Unlaunched:
    """`sums` is where it ends. launch: with what its kernel is told of the group. tail: what it
    makes, or (True) adds to, is the sum over ranks."""

    sums: DeviceArray
    launch: Callable[[Line], None]
    tail: Callable[[DeviceArray, bool, Line], None]


def can_send(ops: Launcher, x: DeviceArray, weight: CudaWeight) -> bool:
    """Whether x @ weight.T is one of them."""
    if ops.arch < stream.ARCH or late_norm(x) is not None:
        return False
    pair, card = (weight.type_name, weight.type_name), (ops.multiprocessors, max_shared(ops.arch))
    sizes = pair, x.shape[1], len(x), weight.shape[:1], (), False
    return stream.can_push(stream.Task(*sizes, *card, is_tiled=weight.is_tiled))


def product_of(
    ops: Launcher, x: DeviceArray, weight: CudaWeight, bias: CudaWeight | None
) -> Unlaunched:
    """x @ weight.T + bias, of those that `can_send`."""
    sums = ops.scratch((len(x), weight.shape[0]))
    product, pair = Product(weight, bias, sums), (weight.type_name, weight.type_name)
    launch = Launch.of(ops, x, [product], PLAIN, pair)

    def launch_it(line: Line) -> None:
        is_launched = streamed(ops, x, replace(launch, line=line))
        assert is_launched, launch

    def end_it(out: DeviceArray, adds: bool, line: Line) -> None:
        own = Launch.of(ops, x, [Product(weight, bias, out)], ADD if adds else PLAIN, pair)
        is_launched = streamed(ops, x, replace(own, line=line, tails=True))
        assert is_launched, own

    return Unlaunched(sums, launch_it, end_it)
