"""The part of CudaOps that is about norms and other ranks: what is launched at once, and what late.

A sum over ranks can do more in its pass over memory than add: finish the product before it, and
norm its rows for the product behind it. So models need not say so, both wait here until the next
call of Ops shows what they can be joined with; a norm without such a sum may still be its reader's
(norms.py). Knows neither cupy nor processes.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda import gemm, group, rows
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Launcher
from voltapile.kernels.cuda.links import Links
from voltapile.kernels.cuda.matmul import PLAIN
from voltapile.kernels.cuda.norms import LateNorms, late_norm
from voltapile.kernels.cuda.tails import End, Unlaunched, can_end, product_of
from voltapile.kernels.ops import Arrival, Weight


class Watched:
    """An Arrival that tells if the group has failed meanwhile."""

    def __init__(self, arrival: Arrival, links: Links) -> None:
        self._arrival, self._links = arrival, links

    def is_there(self) -> bool:
        return self._arrival.is_there()

    def take(self) -> list[np.ndarray]:
        found = self._arrival.take()
        self._links.check()
        return found


@dataclass(frozen=True)
class Unfinished:
    """A product of many rows, not yet multiplied by its rows' scales; `sums` is where it ends."""

    sums: DeviceArray
    scales: DeviceArray
    bias: CudaWeight | None


@dataclass(frozen=True)
class Late:
    """A sum into `out` that has not been launched. exact: so many first rows."""

    part: DeviceArray | None
    out: DeviceArray
    exact: int
    scales: DeviceArray | None = None
    bias: CudaWeight | None = None

    @property
    def is_loose(self) -> bool:
        return self.exact == 0 < len(self.out)

    def leaves(self, place: DeviceArray) -> bool:
        """Whether nothing that is read lies there."""
        read = [each for each in (self.part, self.scales) if each is not None]
        end = place.ptr + place.nbytes
        return all(place.ptr >= each.ptr + each.nbytes or end <= each.ptr for each in read)


class CudaCollectives(ABC):
    """See kernels/group.py. wires.py makes links. Before anything is launched comes `_catch_up`."""

    _links: Links | None = None
    _unfinished: Unfinished | Unlaunched | None = None
    _late: Late | None = None

    @functools.cached_property
    def _norms(self) -> LateNorms:
        return LateNorms()

    def rms_norm(
        self, x: DeviceArray, weight: Weight, eps: float, add_to: DeviceArray | None = None
    ) -> DeviceArray:
        assert isinstance(weight, CudaWeight)
        self._changes(add_to)
        if add_to is not None:
            return rows.rms_norm(self._launcher(), x, weight, eps, add_to)
        if (normed := self._norm_late(x, weight, eps)) is not None:
            return normed
        return self._norms.norm(self._launcher(), x, weight, eps)

    def _changes(self, x: DeviceArray | None, read: DeviceArray | None = None) -> None:
        """Before something is added to x. read: what that is made of, in case it is a late norm."""
        if x is not None:
            if (late := None if read is None else late_norm(read)) is not None:
                late.make()
            self._norms.change(x)

    def all_reduce(
        self, part: DeviceArray | None, shape: tuple[int, int], add_to: DeviceArray | None = None
    ) -> DeviceArray:
        assert part is None or part.shape == shape, (part, shape)
        assert add_to is None or add_to.shape == shape, (add_to, shape)
        self._changes(add_to)
        ops, links = self._launcher(), self._links
        if links is None and part is not None and add_to is None:
            return part
        if links is not None and (found := self._sum_in_tail(links, part, add_to)) is not None:
            return found
        out = ops.scratch(shape) if add_to is None else add_to
        late = self._joined(part, out)
        if late is None:
            self._catch_up()
        if links is None:
            group.add(ops, part, out, add_to is not None)
            return out
        late = late or Late(part, out, self._exact_rows(shape[0]))
        if add_to is not None and _waits_for_norm(links, late):
            self._late = late
        else:
            _sum(ops, links, late, add_to is not None)
        return out

    def _sum_in_tail(
        self, links: Links, part: DeviceArray | None, add_to: DeviceArray | None
    ) -> DeviceArray | None:
        """The sum, if the product that makes this part can make it."""
        product = self._unfinished
        if not isinstance(product, Unlaunched) or part is None or product.sums.ptr != part.ptr:
            return None
        self._unfinished = None
        # What it reads may be free by now, and a new array could lie there; its own cannot.
        out = product.sums if add_to is None else add_to
        product.launch(out, add_to is not None, group.line_of(links))
        return out

    def _goes_by_tails(self, shape: tuple[int, int]) -> bool:
        """Whether products make a sum of that shape in their tail, should they be able to."""
        return self._links is not None and _by_tails(self._links, shape, self._exact_rows(shape[0]))

    def _exact_rows(self, rows: int) -> int:
        """So many first rows of this step have sums that nothing beside them changes."""
        return rows

    def _product_late(
        self, x: DeviceArray, weight: CudaWeight, bias: CudaWeight | None, is_fused: bool
    ) -> DeviceArray | None:
        """x @ weight.T + bias, to be finished by the sum over ranks; None if that cannot be."""
        shape, links = (len(x), weight.shape[0]), self._links
        if links is None:
            return None
        if (exact := self._exact_rows(len(x))) == len(x):
            return self._tail_late(x, weight, bias)
        if exact or not group.can_sum_rows(links, shape):
            return None
        if not gemm.fits([weight], x.shape[1], is_fused):
            return None
        self._catch_up()
        ops = self._launcher()
        sums = ops.scratch(shape)
        with ops.scope():
            halves = gemm.halves_of(ops, x, [weight])[gemm.is_natural(weight)]
            gemm.sums(ops, halves, weight, is_fused, sums)
        self._unfinished = Unfinished(sums, halves.scales, bias)
        return sums

    def _tail_late(
        self, x: DeviceArray, weight: CudaWeight, bias: CudaWeight | None
    ) -> DeviceArray | None:
        """As `_product_late`, of rows that are generated."""
        ops = self._launcher()
        if not (self._goes_by_tails((len(x), weight.shape[0])) and can_end(ops, x, weight)):
            return None
        self._catch_up()
        product = product_of(ops, x, weight, bias)
        return self._ends_late(product.sums, product.launch)

    def _ends_late(self, sums: DeviceArray, launch: End) -> DeviceArray:
        """sums, which `launch` makes. It will be the next launch."""
        self._unfinished = Unlaunched(sums, launch)
        return sums

    def _joined(self, part: DeviceArray | None, out: DeviceArray) -> Late | None:
        """The sum that finishes the product before it, if that is its part."""
        product = self._unfinished
        if not isinstance(product, Unfinished) or part is None or product.sums.ptr != part.ptr:
            return None
        late = Late(part, out, 0, product.scales, product.bias)
        if not late.leaves(out):
            return None
        self._unfinished = None
        return late

    def _catch_up(self) -> None:
        """Launch what is late."""
        product, self._unfinished = self._unfinished, None
        if isinstance(product, Unlaunched):
            product.launch(product.sums, False, ())
        elif product is not None:
            sums = product.sums
            gemm.finish(self._launcher(), sums, product.scales, sums, product.bias, PLAIN)
        if self._late is not None:
            assert self._links is not None
            late, self._late = self._late, None
            _sum(self._launcher(), self._links, late, True)

    def _norm_late(self, x: DeviceArray, weight: CudaWeight, eps: float) -> DeviceArray | None:
        """The norm of what a late sum gives, together with it; None if that cannot be."""
        late, links, ops = self._late, self._links, self._launcher()
        if late is None or links is None or weight.shape != x.shape[1:]:
            return None
        with ops.scope():
            place = ops.scratch(x.shape)  # where `out` will be; a row's may be another row's part
        if (late.out.ptr, late.out.shape) != (x.ptr, x.shape) or not late.leaves(place):
            return None
        self._late = None
        out = self._norms.place(ops, x, weight, eps)
        if late.is_loose:
            norm = weight, eps, out
            group.all_reduce_rows(ops, links, late.part, x, True, late.scales, late.bias, norm)
        else:
            group.all_reduce_norm(ops, links, late.part, x, weight, eps, out)
        return out

    def all_gather(self, part: DeviceArray | None, rows: int, widths: Sequence[int]) -> DeviceArray:
        if self._links is None:
            assert part is not None, "alone, a rank owns everything"
            return part
        assert len(widths) == self._links.ranks, widths
        out = self._launcher().scratch((rows, sum(widths)))
        group.all_gather(self._launcher(), self._links, part, out, widths)
        return out

    def broadcast_(self, x: DeviceArray, source: int) -> None:
        if self._links is not None:
            group.broadcast_(self._launcher(), self._links, x, source)

    def send(self, x: DeviceArray, target: int) -> None:
        assert self._links is not None, "alone"
        group.send(self._launcher(), self._links, x, target)

    def receive(self, shape: tuple[int, int], source: int) -> DeviceArray:
        assert self._links is not None, "alone"
        out = self._launcher().scratch(shape)
        group.receive(self._launcher(), self._links, out, source)
        return out

    def place(self, x: DeviceArray, width: int, offset: int) -> DeviceArray:
        return group.place(self._launcher(), x, width, offset)

    def _watched(self, arrival: Arrival) -> Arrival:
        return arrival if self._links is None else Watched(arrival, self._links)

    def _check_group(self) -> None:
        if self._links is not None:
            self._links.check()

    @abstractmethod
    def _launcher(self) -> Launcher:
        """When nothing is late any more."""


def _waits_for_norm(links: Links, late: Late) -> bool:
    if late.is_loose:
        return group.can_sum_rows(links, late.out.shape)
    return late.exact == len(late.out) and links.norms and group.can_norm(links, late.out.shape)


def _by_tails(links: Links, shape: tuple[int, ...], exact: int) -> bool:
    """Whether ranks may sum in their products' tail; the same on all."""
    return links.tails and exact == shape[0] > 0 and group.can_tail(links, shape)


def _sum(ops: Launcher, links: Links, late: Late, accumulate: bool) -> None:
    """Exact rows, then the others."""
    if _by_tails(links, late.out.shape, late.exact):
        group.all_reduce_tail(ops, links, late.part, late.out, accumulate)
        return
    if late.scales is not None:
        group.all_reduce_rows(ops, links, late.part, late.out, accumulate, late.scales, late.bias)
        return
    exact, rows = late.exact, len(late.out)
    for way, first, end in ((group.all_reduce, 0, exact), (group.all_reduce_loosely, exact, rows)):
        if first < end:
            part = None if late.part is None else late.part[first:end]
            way(ops, links, part, late.out[first:end], accumulate)
