"""Launchers of matrix products: linear, linears, glu.

Two ways: the row-invariant engine (matmul_rows.cu), in which a row has the same bits in any
company, and for prompt rows, where Policy says so, the product of many rows (gemm.py). Checks
shapes and deals matrices to launches; knows neither cupy nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda.chunks import CHUNKS, Chunk, max_shared
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher

PLAIN, ADD, SILU, GELU = range(4)
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU}
TILES = 2  # of 16 rows, in a block
MANY_PASSES = 4  # times 8 tokens; kernels are compiled for 1 and for as many
MATRICES = 3  # of one launch

# Formats that files mix in one layer; a launch takes both.
PAIRS = {
    ("Q4_K", "Q6_K"), ("Q4_K", "Q5_K"), ("Q5_K", "Q6_K"), ("Q4_K", "Q8_0"), ("Q3_K", "Q5_K"),
    ("Q3_K", "Q4_K"), ("Q2_K", "Q4_K"), ("IQ4_XS", "Q5_K"), ("IQ4_XS", "Q6_K"), ("Q2_K", "Q3_K"),
}  # fmt: skip


def _instance(first: str, other: str, passes: int) -> Instance:
    defines = {"FORMAT": first, "OTHER": other, "WARPS": CHUNKS[first].warps, "TILES": TILES}
    named = tuple((key, str(value)) for key, value in (defines | {"PASSES": passes}).items())
    return Instance("matmul_rows.cu", "matmul_rows", named, is_exact=True)


ROWS = {
    (first, other, passes): _instance(first, other, passes)
    for first, other in [*((name, name) for name in CHUNKS), *sorted(PAIRS)]
    for passes in (1, MANY_PASSES)
}
INSTANCES = list(ROWS.values())


@dataclass(frozen=True)
class _Product:
    weight: CudaWeight
    bias: CudaWeight | None
    out: DeviceArray


def linear(
    ops: Launcher,
    x: DeviceArray,
    weight: CudaWeight,
    bias: CudaWeight | None = None,
    add_to: DeviceArray | None = None,
) -> DeviceArray:
    if add_to is None:
        return linears(ops, x, (weight,), (bias,))[0]
    assert add_to.shape == (len(x), weight.shape[0]), (add_to, x, weight.shape)
    _launch(ops, x, [_Product(weight, bias, add_to)], ADD)
    return add_to


def linears(
    ops: Launcher,
    x: DeviceArray,
    weights: Sequence[CudaWeight],
    biases: Sequence[CudaWeight | None],
) -> tuple[DeviceArray, ...]:
    outs = tuple(ops.scratch((len(x), weight.shape[0])) for weight in weights)
    products = [_Product(*each) for each in zip(weights, biases, outs, strict=True)]
    for launch in _launches(products):
        _launch(ops, x, launch, PLAIN)
    return outs


def glu(
    ops: Launcher,
    x: DeviceArray,
    gate: CudaWeight,
    up: CudaWeight,
    activation: str,
    gate_bias: CudaWeight | None = None,
    up_bias: CudaWeight | None = None,
) -> DeviceArray:
    assert gate.shape == up.shape, (gate.shape, up.shape)
    assert activation in ACTIVATIONS, activation
    out = ops.scratch((len(x), gate.shape[0]))
    if gate.type_name != up.type_name:
        raise ValueError(f"gate is {gate.type_name}, up is {up.type_name}: they must be the same")
    products = [_Product(gate, gate_bias, out), _Product(up, up_bias, out)]
    _launch(ops, x, products, ACTIVATIONS[activation])
    return out


def _launches(products: list[_Product]) -> list[list[_Product]]:
    """As few launches as formats allow, at most three matrices in each."""
    waiting, launches = list(products), []
    while waiting:
        first = waiting.pop(0)
        launch, names = [first], {first.weight.type_name}
        for product in list(waiting):
            wider = names | {product.weight.type_name}
            if len(launch) < MATRICES and _pair_of(wider) is not None:
                launch.append(product)
                names = wider
                waiting.remove(product)
        launches.append(launch)
    return launches


def _pair_of(names: set[str]) -> tuple[str, str] | None:
    """The formats of the instance that takes all of them."""
    if len(names) == 1:
        name = next(iter(names))
        return name, name
    return next((pair for pair in PAIRS if set(pair) == names), None)


def _launch(ops: Launcher, x: DeviceArray, products: list[_Product], epilogue: int) -> None:
    tokens, columns = x.shape
    for product in products:
        assert product.weight.shape[1] == columns, (x, product.weight.shape)
        bias = product.bias
        assert bias is None or bias.shape == product.weight.shape[:1], bias
    if not tokens:
        return
    pair = _pair_of({product.weight.type_name for product in products})
    assert pair is not None, products
    chunks = [CHUNKS[name] for name in pair]
    room = room_for(tokens, chunks, ops.arch)
    passes = 1 if room <= 8 else MANY_PASSES
    others = sum(1 << i for i, p in enumerate(products) if p.weight.type_name != pair[0])
    blocks = sum(-(-product.weight.shape[0] // (16 * TILES)) for product in products)
    if epilogue in (SILU, GELU):
        blocks = -(-products[0].weight.shape[0] // (16 * TILES // 2))
    ops.kernel(ROWS[*pair, passes])(
        (blocks, -(-tokens // room)),
        32 * chunks[0].warps,
        (
            *_matrix_args(products),
            x.ptr,
            *map(np.int32, (columns, tokens, room, epilogue, others)),
        ),
        shared=shared_bytes(room, chunks, ops.arch),
    )


def _matrix_args(products: list[_Product]) -> tuple[int | np.int32, ...]:
    args: list[int | np.int32] = []
    for product in products:
        bias = product.bias.ptr if product.bias is not None else 0
        args += [product.weight.ptr, bias, product.out.ptr, np.int32(product.weight.shape[0])]
    for _ in range(MATRICES - len(products)):
        args += [0, 0, 0, np.int32(0)]
    return tuple(args)


def shared_bytes(room: int, chunks: Sequence[Chunk], arch: int) -> int:
    """Of a block that holds `room` tokens."""
    return max(chunk.warps * chunk.warp_bytes(room, arch) for chunk in chunks)


def room_for(tokens: int, chunks: Sequence[Chunk], arch: int) -> int:
    """Tokens that a block takes: as many as fit, dealt evenly. It changes no bits."""
    room = min(tokens, 8 * MANY_PASSES)
    while shared_bytes(room, chunks, arch) > max_shared(arch):
        room -= 1
        assert room, f"no token fits: {chunks}"
    return -(-tokens // -(-tokens // room))
