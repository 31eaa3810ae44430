"""A product of few rows that is this rank's part of a sum, and makes that sum in its tail.

Or what ends with one, as chosen experts do: their last launch.

It is not launched when it is asked for: whether its values are to be summed, and added to what, is
known when its sum is. Knows neither cupy nor which ranks there are (group.line_of tells a kernel).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from voltapile.kernels.cuda import stream
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Launcher, Line
from voltapile.kernels.cuda.matmul import ADD, PLAIN, Launch, Product, streamed
from voltapile.kernels.cuda.norms import late_norm

# Where what is made goes, whether it is added to that, and what the kernel is told of the group.
End = Callable[[DeviceArray, bool, Line], None]


@dataclass(frozen=True)
class Unlaunched:
    """`sums` is where it ends if no sum over ranks asks for it, and none of what it reads lies."""

    sums: DeviceArray
    launch: End


def can_end(ops: Launcher, x: DeviceArray, weight: CudaWeight) -> bool:
    """Whether x @ weight.T is one of them."""
    if ops.arch < stream.ARCH or late_norm(x) is not None:
        return False
    pair, card = (weight.type_name, weight.type_name), (ops.multiprocessors, max_shared(ops.arch))
    sizes = pair, x.shape[1], len(x), weight.shape[:1], (), False
    return stream.can_tail(stream.Task(*sizes, *card, is_tiled=weight.is_tiled))


def product_of(
    ops: Launcher, x: DeviceArray, weight: CudaWeight, bias: CudaWeight | None
) -> Unlaunched:
    """x @ weight.T + bias, of those that `can_end`."""
    sums, pair = ops.scratch((len(x), weight.shape[0])), (weight.type_name, weight.type_name)

    def launch(out: DeviceArray, adds: bool, line: Line) -> None:
        own = Launch.of(ops, x, [Product(weight, bias, out)], ADD if adds else PLAIN, pair)
        is_launched = streamed(ops, x, replace(own, line=line))
        assert is_launched, own

    return Unlaunched(sums, launch)
