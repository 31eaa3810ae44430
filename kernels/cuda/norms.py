"""Norms that wait until somebody needs them: a product of few rows norms what it reads itself.

A Normed is an array that nobody has computed. A product that norms what it reads (stream.py) takes
it apart, and what makes records of it (records.py) computes it on the way; whoever asks for its
address has it computed first, so no launcher needs to know. Since a norm has the same bits either
way, who does which changes nothing. A router's logits have other bits if it norms rows itself, so
it does that whether they have been normed or not (`norm_of`). Knows neither cupy nor models.
"""

from __future__ import annotations

import weakref

from voltapile.kernels.cuda import clusters, rows, stream
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Launcher

FROM = rows.LONGEST_HEAD + 1  # columns of a row
RUN = 256  # columns that are added up by themselves: csrc/norm_row.cuh


class Normed(DeviceArray):
    """rms_norm of x by weight and eps. It is late until it lies in memory, and is lost if x changes
    before that."""

    __slots__ = (
        "__weakref__",
        "_is_lost",
        "_ops",
        "_place",
        "eps",
        "is_late",
        "weight",
        "x",
    )

    def __init__(self, ops: Launcher, x: DeviceArray, weight: CudaWeight, eps: float) -> None:
        self._ops, self.x, self.weight, self.eps = ops, x, weight, eps
        self._place = ops.scratch(x.shape)
        self.is_late, self._is_lost = True, False
        ops.kernel(rows.norm_instance(weight.shape[0]))  # to be there in any case
        super().__init__(self._place.ptr, x.shape, x.dtype, self._place.owner)

    @property
    def ptr(self) -> int:
        self.make()
        return self._place.ptr

    @ptr.setter
    def ptr(self, value: int) -> None:
        assert value == self._place.ptr, "an array stays where it is"

    def make(self) -> None:
        if self.is_late:
            self.assert_kept()
            self.is_late = False
            rows.rms_norm(self._ops, self.x, self.weight, self.eps, out=self._place)

    def take(self) -> int:
        """Where it goes, for a kernel that computes it on the way."""
        assert self.is_late
        self.assert_kept()
        self.is_late = False
        return self._place.ptr

    def assert_kept(self) -> None:
        assert not self._is_lost, "the rows of this norm have changed"

    def lose(self) -> None:
        self._is_lost = True


class LateNorms:
    """Those of a step that somebody may still ask for."""

    def __init__(self) -> None:
        self._asked = weakref.WeakSet[Normed]()

    def norm(
        self,
        ops: Launcher,
        x: DeviceArray,
        weight: CudaWeight,
        eps: float,
    ) -> DeviceArray:
        if not _can_wait(ops, x, weight):
            return rows.rms_norm(ops, x, weight, eps)
        made = self._asked_for(ops, x, weight, eps)
        if not 0 < len(x) <= (clusters.MOST if ops.arch >= clusters.ARCH else stream.TOKENS):
            made.make()
        return made

    def place(self, ops: Launcher, x: DeviceArray, weight: CudaWeight, eps: float) -> DeviceArray:
        """Where a sum over ranks is about to put the norm of what it gives."""
        if not _can_wait(ops, x, weight):
            return ops.scratch(x.shape)
        made = self._asked_for(ops, x, weight, eps)
        made.take()
        return made

    def _asked_for(self, ops: Launcher, x: DeviceArray, weight: CudaWeight, eps: float) -> Normed:
        made = Normed(ops, x, weight, eps)
        self._asked.add(made)
        return made

    def change(self, x: DeviceArray) -> None:
        """Something is about to be added to x."""
        for each in self._asked:
            if each.x.ptr < x.ptr + x.nbytes and x.ptr < each.x.ptr + each.x.nbytes:
                each.lose()

    def forget(self) -> None:
        """A step begins."""
        self._asked.clear()


def _can_wait(ops: Launcher, x: DeviceArray, weight: CudaWeight) -> bool:
    columns = weight.shape[0]
    is_whole = x.shape[1:] == (columns,) and columns % RUN == 0
    # That of a head is another kernel's, of other bits.
    return ops.arch >= stream.ARCH and is_whole and FROM <= columns <= rows.LONGEST_ROW


def late_norm(x: DeviceArray) -> Normed | None:
    if not isinstance(x, Normed) or not x.is_late:
        return None
    x.assert_kept()
    return x


def norm_of(x: DeviceArray) -> Normed | None:
    """The norm that x is, computed or not: whoever reads its rows may norm them anew."""
    if not isinstance(x, Normed):
        return None
    x.assert_kept()
    return x
