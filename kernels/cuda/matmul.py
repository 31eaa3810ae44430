"""Launchers of matrix products: linear, linears, glu.

Two ways: the row-invariant engine, in which a row has the same bits in any company, and for prompt
rows, where Policy says so, the product of many rows (gemm.py). The engine is matmul_rows.cu; from
sm_80 on, where stream.py, clusters.py and wide.py say so, it is matmul_stream.cu for few rows and
matmul_cluster.cu or matmul_wide.cu for more. Checks shapes and deals matrices to launches; knows
neither cupy nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from voltapile.kernels.cuda import clusters, gemm, records, stream, wide
from voltapile.kernels.cuda.chunks import CHUNKS, Chunk, max_shared
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher, Line
from voltapile.kernels.cuda.norms import late_norm
from voltapile.kernels.cuda.trail import Tiles
from voltapile.shm.formats import row_bytes

PLAIN, ADD, SILU, GELU = range(4)
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU}
TILES = 2  # of 16 rows, in a block; one where few rows would leave the card half empty
FEW_ROWS = 4096  # of a launch whose blocks take one tile
MANY_TURNS = 8  # of a block, from which on one row is better off with blocks that stay
MATRICES = 3  # of one launch
# Prompt rows of a step from which on they take the product of many rows: the fused one, or the
# library's; 0 is never. On an H200 the library wins from about 64 rows on.
FUSED_FROM, CUBLAS_FROM = 0, 64

# Formats that files mix in one layer; a launch takes both.
PAIRS = {
    ("Q4_K", "Q6_K"), ("Q4_K", "Q5_K"), ("Q5_K", "Q6_K"), ("Q4_K", "Q8_0"), ("Q3_K", "Q5_K"),
    ("Q3_K", "Q4_K"), ("Q2_K", "Q4_K"), ("IQ4_XS", "Q5_K"), ("IQ4_XS", "Q6_K"), ("Q2_K", "Q3_K"),
}  # fmt: skip


LOOPING = [name for name, chunk in CHUNKS.items() if chunk.is_direct]
SINGLE = {(each, each) for each in ("Q4_K", "Q6_K", "Q8_0")} | {("Q4_K", "Q6_K")}


def _instance(first: str, other: str, many: int, tiles: int, loops: int) -> Instance:
    defines = {"FORMAT": first, "OTHER": other, "WARPS": CHUNKS[first].warps}
    defines |= {"TILES": tiles, "MANY": many, "LOOPS": loops}
    named = tuple((key, str(value)) for key, value in defines.items())
    return Instance("matmul_rows.cu", "matmul_rows", named, is_exact=True, waits=True)


ROWS = {
    (first, other, many, TILES, 0): _instance(first, other, many, TILES, 0)
    for first, other in [*((name, name) for name in CHUNKS), *sorted(PAIRS)]
    for many in (0, 1)  # whether for more than 8 tokens
}
ROWS |= {(*pair, 0, 1, 0): _instance(*pair, 0, 1, 0) for pair in sorted(SINGLE)}
ROWS |= {(each, each, 0, TILES, 1): _instance(each, each, 0, TILES, 1) for each in LOOPING}
INSTANCES = [*ROWS.values(), *stream.INSTANCES, *wide.INSTANCES, *clusters.INSTANCES]
INSTANCES += [*records.INSTANCES, *gemm.INSTANCES]


@dataclass(frozen=True)
class Policy:
    """Which rows may take the product of many rows; part of the Plan, for it changes bits.

    generated: so many first rows of a step are generated ones and always take the engine. Of the
    others, many enough take the fused product (fused_from) or the library's (cublas_from); 0 is
    never.
    """

    generated: int = 0
    fused_from: int = 0
    cublas_from: int = 0

    def way(self, prompt_rows: int) -> str:
        if self.cublas_from and prompt_rows >= self.cublas_from:
            return "library"
        return "fused" if self.fused_from and prompt_rows >= self.fused_from else "rows"


EVERY_ROW_ALONE = Policy()


@dataclass(frozen=True)
class Product:
    weight: CudaWeight
    bias: CudaWeight | None
    out: DeviceArray


@dataclass(frozen=True)
class Launch:
    """others: which of the products are of the pair's second format, a bit each. matrices: what
    kernels are told of them. line: and of other ranks, if what is made is the sum over them
    (tails.py). is_only: no other launch reads the same rows, as far as is known."""

    task: stream.Task
    epilogue: int
    others: int
    matrices: tuple[int | np.int32, ...]
    line: Line = ()
    is_only: bool = True

    @classmethod
    def of(
        cls,
        ops: Launcher,
        x: DeviceArray,
        products: list[Product],
        epilogue: int,
        pair: tuple[str, str],
    ) -> Launch:
        (tokens, columns), is_glu = x.shape, epilogue in (SILU, GELU)
        own = tuple(p.weight.shape[0] for p in products if p.weight.type_name == pair[0])
        rest = tuple(p.weight.shape[0] for p in products if p.weight.type_name != pair[0])
        others = sum(1 << i for i, p in enumerate(products) if p.weight.type_name != pair[0])
        card = ops.multiprocessors, max_shared(ops.arch)
        is_tiled = all(product.weight.is_tiled for product in products)
        task = stream.Task(pair, columns, tokens, own, rest, is_glu, *card, is_tiled=is_tiled)
        return cls(task, epilogue, others, _matrix_args(products))


def linear(
    ops: Launcher,
    x: DeviceArray,
    weight: CudaWeight,
    bias: CudaWeight | None = None,
    add_to: DeviceArray | None = None,
    policy: Policy = EVERY_ROW_ALONE,
) -> DeviceArray:
    if add_to is None:
        return linears(ops, x, (weight,), (bias,), policy)[0]
    assert add_to.shape == (len(x), weight.shape[0]), (add_to, x, weight.shape)
    _multiply(ops, x, [Product(weight, bias, add_to)], ADD, policy)
    return add_to


def linears(
    ops: Launcher,
    x: DeviceArray,
    weights: Sequence[CudaWeight],
    biases: Sequence[CudaWeight | None],
    policy: Policy = EVERY_ROW_ALONE,
) -> tuple[DeviceArray, ...]:
    outs = tuple(ops.scratch((len(x), weight.shape[0])) for weight in weights)
    products = [Product(*each) for each in zip(weights, biases, outs, strict=True)]
    _multiply(ops, x, products, PLAIN, policy)
    return outs


def glu(
    ops: Launcher,
    x: DeviceArray,
    gate: CudaWeight,
    up: CudaWeight,
    activation: str,
    gate_bias: CudaWeight | None = None,
    up_bias: CudaWeight | None = None,
    policy: Policy = EVERY_ROW_ALONE,
) -> DeviceArray:
    assert gate.shape == up.shape, (gate.shape, up.shape)
    assert activation in ACTIVATIONS, activation
    out = ops.scratch((len(x), gate.shape[0]))
    products = [Product(gate, gate_bias, out), Product(up, up_bias, out)]
    _multiply(ops, x, products, ACTIVATIONS[activation], policy)
    return out


def _multiply(
    ops: Launcher, x: DeviceArray, products: list[Product], epilogue: int, policy: Policy
) -> None:
    """Deals the rows to the engine and to the product of many rows."""
    tokens, columns = x.shape
    for product in products:
        assert product.weight.shape[1] == columns, (x, product.weight.shape)
        bias = product.bias
        assert bias is None or bias.shape == product.weight.shape[:1], bias
    alone = min(tokens, policy.generated)
    way = policy.way(tokens - alone)
    weights = [product.weight for product in products]
    if way == "rows" or not gemm.fits(weights, columns, way == "fused"):
        alone = tokens
    first = x if alone == tokens else x[:alone]
    _rows(ops, first, _first_rows(products, 0, alone), epilogue)
    if alone < tokens:
        with ops.scope():
            many = _first_rows(products, alone, tokens)
            _many_rows(ops, x[alone:], many, epilogue, way == "fused")


def _first_rows(products: list[Product], start: int, end: int) -> list[Product]:
    return [Product(p.weight, p.bias, p.out[start:end]) for p in products]


def _many_rows(
    ops: Launcher, x: DeviceArray, products: list[Product], epilogue: int, is_fused: bool
) -> None:
    halves = gemm.halves_of(ops, x, [product.weight for product in products])
    made = []
    for product in products:
        own = halves[gemm.is_natural(product.weight)]
        if epilogue not in (SILU, GELU):
            with ops.scope():
                sums = gemm.sums(ops, own, product.weight, is_fused)
                gemm.finish(ops, sums, own.scales, product.out, product.bias, epilogue)
        else:
            made.append(gemm.sums(ops, own, product.weight, is_fused))
    if made:
        gate, up = products
        own = halves[gemm.is_natural(gate.weight)]
        gemm.finish(ops, made[0], own.scales, gate.out, gate.bias, epilogue, made[1], up.bias)


def _rows(ops: Launcher, x: DeviceArray, products: list[Product], epilogue: int) -> None:
    if not len(x):
        return
    if epilogue in (SILU, GELU):
        if len({(each.weight.type_name, each.weight.is_tiled) for each in products}) == 1:
            _launch(ops, x, products, epilogue)
        else:
            _glu_of_two_kinds(ops, x, products, epilogue)
        return
    launches = _launches(products)
    for launch in launches:
        _launch(ops, x, launch, epilogue, len(launches) == 1)


def _glu_of_two_kinds(
    ops: Launcher, x: DeviceArray, products: list[Product], epilogue: int
) -> None:
    with ops.scope():
        weights, biases = zip(*((each.weight, each.bias) for each in products), strict=True)
        gate, up = linears(ops, x, weights, biases)
        ones = ops.constant(np.ones(len(x), np.float32))
        gemm.finish(ops, gate, ones, products[0].out, None, epilogue, up)


def _launches(products: list[Product]) -> list[list[Product]]:
    """As few as formats allow, of three matrices at most. Whole tiles, which stream, are apart."""
    waiting, launches = list(products), []
    while waiting:
        first = waiting.pop(0)
        launch, names = [first], {first.weight.type_name}
        for product in list(waiting):
            wider = names | {product.weight.type_name}
            is_alike = product.weight.is_tiled == first.weight.is_tiled
            if len(launch) < MATRICES and is_alike and _pair_of(wider) is not None:
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


def _launch(
    ops: Launcher, x: DeviceArray, products: list[Product], epilogue: int, is_only: bool = True
) -> None:
    pair = _pair_of({product.weight.type_name for product in products})
    assert pair is not None, products
    launch = replace(Launch.of(ops, x, products, epilogue, pair), is_only=is_only)
    if any(way(ops, x, launch) for way in (streamed, _clusters, _wide)):
        return
    tokens, columns, is_glu = launch.task.tokens, launch.task.columns, launch.task.is_glu
    chunks = [CHUNKS[name] for name in pair]
    room = room_for(tokens, chunks, ops.arch)
    rows = [product.weight.shape[0] for product in products]
    # What follows changes no bits.
    is_few = sum(rows) <= FEW_ROWS and not is_glu and room <= 8 and pair in SINGLE
    tiles = 1 if is_few else TILES
    blocks = sum(-(-each // (16 * tiles)) for each in rows)
    if is_glu:
        blocks = -(-rows[0] // (16 * TILES // 2))
    shared, most = shared_bytes(room, chunks, ops.arch), 2 * ops.multiprocessors
    slots = _slots(pair, columns, room, shared, ops.arch) if tiles == TILES else 0
    loops = slots and blocks > (most if room > 1 else MANY_TURNS * most)
    if loops:
        shared += (slots - 1) * chunks[0].warps * chunks[0].slot_bytes(room)
    tiled = sum(product.weight.is_tiled << i for i, product in enumerate(products))
    numbers = columns, tokens, room, epilogue, launch.others, tiled, slots if loops else 1
    ops.kernel(ROWS[*pair, int(room > 8), tiles, int(bool(loops))])(
        (most if loops else blocks, -(-tokens // room)),
        32 * chunks[0].warps,
        (*launch.matrices, x.ptr, *map(np.int32, numbers)),
        shared=shared,
    )


def streamed(ops: Launcher, x: DeviceArray, launch: Launch) -> bool:
    """Whether it was a product for matmul_stream.cu; then it is launched."""
    if ops.arch < stream.ARCH:
        return False
    task, norm = launch.task, late_norm(x)
    if launch.epilogue == ADD:
        norm = None  # what is added to may be what the norm is made of
    deal = None if norm is None else stream.deal(replace(task, is_normed=True))
    if deal is None:
        norm, deal = None, stream.deal(task)
        if deal is None:
            return False
    matrices, ends = stream.placed(task, launch.others, launch.matrices)
    read = x.ptr if norm is None else norm.x.ptr
    kernel = ops.kernel(deal.instance(task.pair, bool(launch.line)))
    early = stream.EARLY if ops.trail.held > stream.LEFT else deal.depth
    numbers = task.columns, task.tokens, launch.epilogue, *ends, deal.first_other, deal.depth, early
    gain, eps = (0, 0.0) if norm is None else (norm.weight.ptr, norm.eps)
    shares = np.float32(eps), np.float32(1) / np.float32(task.columns)
    ptr, _, _, rows = map(int, launch.matrices[:4])
    row = row_bytes(task.pair[launch.others & 1], task.columns)
    own = Tiles(ptr, stream.ROWS * row, rows // stream.ROWS)
    behind = ops.trail.behind(own, deal.turns(task) <= early) if launch.line else ()
    ops.trail.note(own, bool(launch.line))
    args = (*matrices, read, *map(np.int32, numbers), gain, *shares, *launch.line, *behind)
    kernel((deal.blocks,), deal.threads, args, shared=deal.shared)
    return True


def _clusters(ops: Launcher, x: DeviceArray, launch: Launch) -> bool:
    """Whether it was a product for matmul_cluster.cu; then it is launched."""
    task = launch.task
    deal = clusters.deal(task) if ops.arch == clusters.ARCH else None
    if deal is None:
        return False
    numbers = task.columns, task.tokens, deal.room, launch.epilogue, launch.others
    how = bool(launch.others), launch.is_only, records.Seating(deal.room, 8 * deal.passes)
    with ops.scope():
        own, other = 0, 0
        if late_norm(x) is not None or task.columns >= clusters.STAGED_FROM:
            own, other = records.made(ops, x, task.pair, *how)
        is_told = bool(own or other) and late_norm(x) is not None  # in records alone
        read = 0 if is_told else x.ptr
        ops.kernel(clusters.CLUSTER[task.pair, deal.passes])(
            (deal.clusters * clusters.CLASSES, -(-task.tokens // deal.room)),
            32 * deal.crew,
            (*launch.matrices, read, own, other, *map(np.int32, (*numbers, *deal.numbers))),
            shared=deal.shared,
        )
    return True


def _wide(ops: Launcher, x: DeviceArray, launch: Launch) -> bool:
    """Whether it was a product for matmul_wide.cu; then it is launched."""
    task = launch.task
    deal = wide.deal(task) if ops.arch >= stream.ARCH else None
    if deal is None:
        return False
    with ops.scope():
        own, other = records.made(ops, x, task.pair, bool(launch.others), launch.is_only)
        numbers = task.columns, task.tokens, deal.room, launch.epilogue, launch.others
        ops.kernel(wide.WIDE[task.pair, int(deal.room > wide.PASS)])(
            (deal.blocks, -(-task.tokens // deal.room)),
            32 * stream.WARPS,
            (*launch.matrices, own, other, *map(np.int32, (*numbers, deal.first_other))),
            shared=deal.shared,
        )
    return True


def _slots(pair: tuple[str, str], columns: int, room: int, shared: int, arch: int) -> int:
    """Chunks of a warp, if the tokens of all of them fit twice beside each other; else 0.

    A block then stays and takes one tile after the other, and stages its tokens once.
    """
    chunk = CHUNKS[pair[0]]
    if not chunk.is_direct or arch >= 80 or pair[0] != pair[1] or room > 8:
        return 0
    slots = -(-columns // (32 * chunk.groups * chunk.warps))
    more = (slots - 1) * chunk.warps * chunk.slot_bytes(room)
    return slots if shared + more <= max_shared(arch) // 2 else 0


def _matrix_args(products: list[Product]) -> tuple[int | np.int32, ...]:
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
    room = min(tokens, 32 if arch >= 80 else 16)
    while shared_bytes(room, chunks, arch) > max_shared(arch):
        room -= 1
        assert room, f"no token fits: {chunks}"
    return -(-tokens // -(-tokens // room))
