"""What sums over ranks wait for, and what they are joined with: names of launches, no kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda.collectives import CudaCollectives
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance
from voltapile.kernels.cuda.links import Islands, Links
from voltapile.kernels.cuda.norms import norm_of
from voltapile.kernels.cuda.trail import Trail


class Alone(CudaCollectives):
    """Writes down what is launched; arrays are numbers. exact: rows of every step."""

    multiprocessors, arch = 4, 70

    def __init__(self, ranks: int = 3, exact: int | None = None) -> None:
        self.launched: list[str] = []
        self.instances: list[Instance] = []
        self.exact, self.trail = exact, Trail()
        report = np.zeros(2, np.uint32)
        self._links = Links(1, 0, ranks, Islands((tuple(range(ranks)),)), report)
        self._links.norms = True
        self.end = 1 << 20

    def _launcher(self) -> Any:
        return self

    def _exact_rows(self, rows: int) -> int:
        return rows if self.exact is None else self.exact

    def kernel(self, instance: Instance) -> Callable[..., None]:
        self._catch_up()
        self.instances.append(instance)
        return lambda grid, block, args, shared=0: self.launched.append(instance.function)

    def scratch(self, shape: tuple[int, ...], dtype: Any = np.float32) -> DeviceArray:
        array = DeviceArray(self.end, shape, dtype)
        self.end += array.nbytes
        return array

    def constant(self, values: np.ndarray) -> DeviceArray:
        return self.scratch(values.shape, values.dtype)

    def product(self, *args: Any) -> None:
        self.launched.append("product")

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        end = self.end
        yield
        self.end = end


def test_a_sum_waits_for_the_norm_after_it() -> None:
    ops, shape = Alone(), (2, 4096)
    x, part, other = (ops.scratch(shape) for _ in range(3))
    weight = CudaWeight((4096,), 16384, "F32", 1, 16384)
    ops.all_reduce(part, shape, x)
    assert ops.launched == []
    assert ops._norm_late(other, weight, 1e-6) is None  # of something else
    normed = ops._norm_late(x, weight, 1e-6)
    assert normed is not None
    assert normed.shape == shape
    assert ops.launched == ["group_sum_norm"]
    assert ops._norm_late(x, weight, 1e-6) is None  # once
    ops.all_reduce(None, shape, x)
    ops.all_gather(other, 2, [4096] * 3)
    assert ops.launched[1:] == ["group_sum", "group_gather"]
    ops.all_reduce(part, shape, x)
    ops.end = part.ptr - 8  # so that the norm's rows would lie over other rows' parts
    assert ops._norm_late(x, weight, 1e-6) is None
    ops._catch_up()
    ops._catch_up()
    assert ops.launched[3:] == ["group_sum"]
    ops.all_reduce(part, shape)  # into an array of its own: at once
    assert ops.launched[4:] == ["group_sum"]
    assert ops._links is not None
    ops._links.norms = False
    ops.all_reduce(part, shape, x)
    assert ops.launched[5:] == ["group_sum"]


def test_a_router_norms_rows_whoever_has_normed_them() -> None:
    """A row's logits do not depend on what a sum over ranks did, nor on how many rows there are."""
    weight = CudaWeight((4096,), 16384, "F32", 1, 16384)
    for rows, tails in ((2, True), (2, False), (9, False), (40, False), (100, False)):
        ops, shape = Alone(2), (rows, 4096)
        assert ops._links is not None
        ops.arch, ops._links.tails, ops._links.norms = 90, tails, not tails
        x, part = ops.scratch(shape), ops.scratch(shape)
        ops.all_reduce(part, shape, x)
        norm = norm_of(ops.rms_norm(x, weight, 1e-6))
        assert norm is not None
        assert (norm.x.ptr, norm.weight) == (x.ptr, weight)
        assert norm.is_late == (tails or 32 < rows <= 64)
        ops._changes(x)
        with pytest.raises(AssertionError, match="have changed"):
            norm_of(norm)


def test_a_product_waits_for_the_sum_that_it_is_a_part_of() -> None:
    n, columns = 4096, 512
    row = columns // 32 * 34
    matrix = CudaWeight((n, columns), n * row, "Q8_0", 1, row, is_tiled=True)

    def start(
        tokens: int = 2, arch: int = 90, exact: int | None = None
    ) -> tuple[Alone, DeviceArray, DeviceArray | None]:
        ops = Alone(2, exact)
        assert ops._links is not None
        ops.arch, ops._links.tails = arch, True
        x, inner = ops.scratch((tokens, n)), ops.scratch((tokens, columns))
        return ops, x, ops._product_late(inner, matrix, None, False)

    def tails(ops: Alone) -> int:
        return sum("TAIL" in instance.name for instance in ops.instances)

    ops, x, part = start()
    assert part is not None
    assert ops.launched == []
    assert ops.all_reduce(part, (2, n), x) is x
    assert (ops.launched, tails(ops)) == (["matmul_stream"], 1)
    ops, x, part = start()
    end = ops.end
    found = ops.all_reduce(part, (2, n))  # where the part would be
    assert part is not None
    assert (found.ptr, ops.end) == (part.ptr, end)
    assert (ops.launched, tails(ops)) == (["matmul_stream"], 1)
    in_memory = ["matmul_stream", "group_tail"]
    ops, x, part = start()
    ops._catch_up()  # it was not a sum's part
    ops.all_reduce(part, (2, n), x)
    ops._catch_up()
    assert (ops.launched, tails(ops)) == (in_memory, 0)
    ops, x, part = start()
    ops.all_reduce(None, (2, n), x)  # of something else
    ops._catch_up()
    assert (ops.launched, tails(ops)) == (in_memory, 0)
    ops, x, part = start(arch=75)  # not that one's
    assert part is None
    ops.all_reduce(None, (2, n), x)
    ops._catch_up()
    assert ops.launched == ["group_tail"]
    ops.all_reduce(None, (2, n), x)
    ops.rms_norm(x, CudaWeight((n,), 4 * n, "F32", 1, 4 * n), 1e-6)
    assert ops.launched[1:] == ["group_sum_norm"]
    for others in (start(9), start(exact=1)):  # many, or beside a prompt's
        assert others[2] is None
        ops, x, _ = others
        ops.all_reduce(None, x.shape, x)
        ops._catch_up()
        assert "group_tail" not in ops.launched


def test_a_prompts_sum_waits_for_the_norm_after_it() -> None:
    weight = CudaWeight((4096,), 16384, "F32", 1, 16384)
    for exact, launched in (
        (0, ["group_sum_rows"]),
        (3, ["group_sum", "group_sum_rows"]),
        (50, ["group_sum_twins", "group_sum_rows"]),
    ):
        ops, shape = Alone(2, exact), (128, 4096)
        x, part = ops.scratch(shape), ops.scratch(shape)
        ops.all_reduce(part, shape, x)
        assert (ops._norm_late(x, weight, 1e-6) is not None) == (exact == 0)
        ops._catch_up()
        assert ops.launched == launched
    ops = Alone(3, 3)
    ops.all_reduce(part, shape, x)
    assert ops.launched == ["group_sum", "group_sum_pieces"]
    ops = Alone(2, 3)
    ops.all_reduce(part[:10], (10, 4096), x[:10])  # too little to be worth it
    ops._catch_up()
    assert ops.launched == ["group_sum", "group_sum"]


def test_a_prompts_sum_finishes_the_product_before_it() -> None:
    rows, columns, n = 128, 256, 4096
    norm = CudaWeight((n,), 4 * n, "F32", 1, 4 * n)
    row = columns // 32 * 34
    matrix = CudaWeight((n, columns), n * row, "Q8_0", 1, row, is_tiled=True)
    before = ["tokens_to_half", "weights_to_half", "product"]

    def start(exact: int) -> tuple[Alone, DeviceArray, DeviceArray | None]:
        ops = Alone(2, exact)
        x = ops.scratch((rows, n))
        with ops.scope():
            ops.scratch((rows, n))  # a layer's normed input, where the next one's will be
            inner = ops.scratch((rows, columns))
            return ops, x, ops._product_late(inner, matrix, None, False)

    ops, x, part = start(0)
    assert ops.launched == before
    ops.all_reduce(part, (rows, n), x)
    assert ops._norm_late(x, norm, 1e-6) is not None
    assert ops.launched == [*before, "group_sum_rows"]
    ops, x, part = start(0)
    ops._catch_up()  # it was not a sum's part
    ops.all_reduce(part, (rows, n), x)
    ops._catch_up()
    assert ops.launched == [*before, "finish_sums", "group_sum_rows"]
    ops, x, part = start(0)
    ops.all_reduce(None, (rows, n), x)  # of something else
    ops._catch_up()
    assert ops.launched == [*before, "finish_sums", "group_sum_rows"]
    ops, x, part = start(0)
    ops.all_reduce(part, (rows, n))
    assert ops.launched == [*before, "group_sum_rows"]
    ops, x, part = start(0)
    ops.end = part.ptr if part else 0  # so that the sum would lie over what it is made of
    ops.all_reduce(part, (rows, n))
    assert ops.launched == [*before, "finish_sums", "group_sum_rows"]
    assert start(1)[2] is None
