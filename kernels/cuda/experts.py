"""Launchers of routed experts: the choice of them, the chosen ones' products, gates beside them.

A layer's table says where each of its experts lies, so that kernels need not know who put it
there. Takes a Launcher and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

import numpy as np
from voltapile.kernels.cuda import expert_groups, expert_stream, matmul
from voltapile.kernels.cuda.chunks import CHUNKS, max_shared
from voltapile.kernels.cuda.expert_table import ExpertTable, Shared
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.matmul import EVERY_ROW_ALONE, Policy
from voltapile.kernels.cuda.norms import norm_of
from voltapile.kernels.cuda.states import TAP_KINDS

MOST_USED = 32  # experts of a token
MOST_EXPERTS = 1024  # of a layer
MOST_PAIRS = 65535  # of a launch: a grid's limit on its second axis
TICKETS = 65536  # of ROUTE: a token has one for each expert
ROUTE_MANY_FROM = 64  # rows of prompts
EARLY = 90  # architecture from which kernels start early
RESERVED = 1024  # bytes of shared memory that every block takes beside its own
FEW = 256  # experts, of which a block of ROUTE has fewer
NORMED = 4096  # columns of a row that it norms itself
GATE, UP = 0, 1


def up_warps(name: str) -> int:
    """Half of those of other products: then all blocks of one token run at once."""
    return max(2, CHUNKS[name].warps // 2)


def _rows(function: str, name: str, warps: int, tiles: int) -> Instance:
    defines = {"FORMAT": name, "WARPS": warps, "TILES": tiles, "MANY": 0}
    named = tuple((key, str(value)) for key, value in defines.items())
    return Instance("expert_rows.cu", function, named, is_exact=True, waits=True)


EXPERT_UP = {name: _rows("expert_up", name, up_warps(name), 2) for name in CHUNKS}
EXPERT_DOWN = {name: _rows("expert_down", name, CHUNKS[name].warps, 1) for name in CHUNKS}
BF16 = Instance("route.cu", "round_to_bf16", waits=True)
HELD = 4, 8, 16, 32  # 32 times as many experts at most: as few as there are, for short code


def _route(function: str, **defines: int) -> Instance:
    named = tuple((key, str(value)) for key, value in defines.items())
    return Instance("route.cu", function, named, waits=True)


SLOTS = 2, 4  # 1,024 times as many columns come at once: as few as there are
EACH = 4, 2  # experts of a block: of several tokens, and of one where there are few experts
ROUTE = {
    (name, held, slots, one): _route("route", KIND=int(kind), HELD=held, SLOTS=slots, ONE=int(one))
    for name, kind in TAP_KINDS.items()
    for held in HELD
    for slots in SLOTS
    for one in ((False, True) if 32 * held <= FEW else (False,))
}
ROUTE_MANY = {name: _route("route_many", KIND=int(kind)) for name, kind in TAP_KINDS.items()}
CHOOSE = {held: _route("choose_experts", HELD=held) for held in HELD}
GATE_ROWS = Instance("route.cu", "gate_rows", waits=True)
GATE_VALUES = Instance("route.cu", "gate_values", waits=True)
JOIN = Instance("route.cu", "join_gate", waits=True)
INSTANCES = [
    *EXPERT_UP.values(),
    *EXPERT_DOWN.values(),
    *expert_groups.INSTANCES,
    *expert_stream.INSTANCES,
    *(*ROUTE.values(), *ROUTE_MANY.values(), *CHOOSE.values()),
    *(BF16, GATE_ROWS, GATE_VALUES, JOIN),
]


def to_bf16(ops: Launcher, x: DeviceArray) -> DeviceArray:
    out = ops.scratch(x.shape)
    if x.size:
        ops.kernel(BF16)((_groups(x.size, 256),), 256, (x.ptr, out.ptr, np.int64(x.size)))
    return out


def fits(router: CudaWeight) -> bool:
    """Whether `route` takes it; else its product comes first, and then `choose`."""
    return router.type_name in TAP_KINDS and router.shape[1] % 4 == 0


def route(
    ops: Launcher,
    x: DeviceArray,
    router: CudaWeight,
    used: int,
    counts: DeviceArray,
    generated: int,
    tickets: DeviceArray,
    is_rounded: bool,
    alone: int | None = None,
) -> tuple[DeviceArray, DeviceArray]:
    """tickets: uint32 zeros, of all layers. alone: as that of `experts`. x may be a late norm."""
    (tokens, columns), experts = x.shape, router.shape[0]
    assert router.shape == (experts, columns), (x, router.shape)
    chosen, weights = _choice(ops, tokens, experts, used, counts)
    first = tokens if alone is None or tokens - alone < ROUTE_MANY_FROM else alone
    held, step = _held(experts), len(tickets) // (8 * experts) * 8
    slots, is_one = SLOTS[columns > 1024 * SLOTS[0]], tokens == 1 and experts <= FEW
    rows, gain, normed, factor = _unnormed(x, is_late=first == tokens, is_rounded=is_rounded)
    for start in range(0, first, step):
        count, before = min(first - start, step), 4 * columns * start
        arrays = router, tickets, chosen[start:], weights[start:], counts
        pointers = rows + before, *(array.ptr for array in arrays), gain, normed and normed + before
        sizes = experts, used, count, max(0, generated - start), columns, int(is_rounded)
        blocks = _groups(experts, EACH[is_one]) + (min(count, 8) if normed else 0) + 1
        grid = blocks, _groups(count, 8)
        ops.kernel(ROUTE[router.type_name, held, slots, is_one])(
            grid,
            256,
            (*pointers, *map(np.int32, sizes), *factor),
            shared=_apart(ops, grid[0] * grid[1], _choice_bytes(held) * min(count, 8)),
        )
    if first < tokens:
        own = chosen[first:], weights[first:]
        with ops.scope():
            logits = _logits(ops, x[first:], router, is_rounded)
            _choose(ops, logits, own, counts, max(0, generated - first))
    return chosen, weights


def _apart(ops: Launcher, blocks: int, needed: int) -> int:
    """Bytes of shared memory of a block: so many that no other fits beside it, if each may have a
    multiprocessor. They would gather on those that the kernel before leaves free."""
    if ops.arch < EARLY or blocks > ops.multiprocessors:
        return needed
    return max(needed, max_shared(ops.arch) // 2 + RESERVED)


def _unnormed(
    x: DeviceArray, is_late: bool, is_rounded: bool
) -> tuple[int, int, int, tuple[np.float32, np.float32]]:
    """Rows, gains of the norm that they need, where it goes if it is not there yet, and what makes
    its factor. is_late: whether it may be made with the logits."""
    columns, norm = x.shape[1], None if is_rounded else norm_of(x)
    if norm is None or columns > NORMED:
        return x.ptr, 0, 0, (np.float32(0), np.float32(0))
    if not is_late:
        norm.make()
    factor = np.float32(1) / np.float32(columns), np.float32(norm.eps)
    return norm.x.ptr, norm.weight.ptr, norm.take() if norm.is_late else 0, factor


def _logits(ops: Launcher, x: DeviceArray, router: CudaWeight, is_rounded: bool) -> DeviceArray:
    """Of prompts' rows."""
    (tokens, columns), experts = x.shape, router.shape[0]
    logits = ops.scratch((tokens, experts))
    ops.kernel(ROUTE_MANY[router.type_name])(
        (_groups(experts, 128), _groups(tokens, 32)),
        128,
        (
            *(x.ptr, router.ptr, logits.ptr),
            *map(np.int32, (experts, tokens, columns, int(is_rounded))),
        ),
    )
    return logits


def choose(
    ops: Launcher, logits: DeviceArray, used: int, counts: DeviceArray, generated: int
) -> tuple[DeviceArray, DeviceArray]:
    tokens, experts = logits.shape
    found = _choice(ops, tokens, experts, used, counts)
    _choose(ops, logits, found, counts, generated)
    return found


def _choose(
    ops: Launcher,
    logits: DeviceArray,
    found: tuple[DeviceArray, DeviceArray],
    counts: DeviceArray,
    generated: int,
) -> None:
    (tokens, experts), (chosen, weights) = logits.shape, found
    if tokens:
        pointers = logits.ptr, chosen.ptr, weights.ptr, counts.ptr
        numbers, held = (experts, chosen.shape[1], tokens, generated), _held(experts)
        ops.kernel(CHOOSE[held])(
            (_groups(tokens, 4),),
            128,
            (*pointers, *map(np.int32, numbers)),
            shared=4 * _choice_bytes(held),
        )


def _choice_bytes(held: int) -> int:
    """Of route.cu's Choice."""
    return (4 + 2) * (32 * held + 64) + 8 * MOST_USED


def _held(experts: int) -> int:
    return next(held for held in HELD if experts <= 32 * held)


def _choice(
    ops: Launcher, tokens: int, experts: int, used: int, counts: DeviceArray
) -> tuple[DeviceArray, DeviceArray]:
    assert used <= min(experts, MOST_USED), (used, experts)
    assert experts <= MOST_EXPERTS, experts
    assert counts.shape == (2, experts), counts
    return ops.scratch((tokens, used), np.int32), ops.scratch((tokens, used))


def experts(
    ops: Launcher,
    x: DeviceArray,
    routing: tuple[DeviceArray, DeviceArray],
    table: ExpertTable,
    add_to: DeviceArray | None = None,
    alone: int | None = None,
    shared: Shared | None = None,
    policy: Policy = EVERY_ROW_ALONE,
) -> DeviceArray:
    """alone: so many first rows have the bits that they have alone; None: all. policy: of the
    shared expert's products with the others."""
    out = ops.scratch(x.shape) if add_to is None else add_to
    weights, adds = (table.gate, table.up, table.down), add_to is not None
    first = len(x) if alone is None else min(alone, len(x))
    if not expert_groups.fits(weights, len(x) - first):
        first = len(x)
    if first:
        own = routing[0][:first], routing[1][:first]
        if expert_stream.fits(ops, table, shared, own[0].shape[1]):
            expert_stream.experts(ops, x[:first], own, table, shared, out[:first], adds)
        else:
            _by_rows(ops, x[:first], own, table, out[:first], adds)
            _add_shared(ops, x[:first], shared, out[:first], EVERY_ROW_ALONE)
    if first < len(x):
        rest = routing[0][first:], routing[1][first:]
        places = table.places, table.first
        expert_groups.experts(ops, x[first:], rest, weights, *places, out[first:], adds)
        _add_shared(ops, x[first:], shared, out[first:], policy)
    return out


def _add_shared(
    ops: Launcher, x: DeviceArray, shared: Shared | None, out: DeviceArray, policy: Policy
) -> None:
    if shared is None:
        return
    with ops.scope():
        inner = matmul.glu(ops, x, shared.gate, shared.up, "silu", policy=policy)
        if shared.router is not None:
            gate_rows_(ops, inner, x, shared.router)
        matmul.linear(ops, inner, shared.down, add_to=out, policy=policy)


def _by_rows(
    ops: Launcher,
    x: DeviceArray,
    routing: tuple[DeviceArray, DeviceArray],
    table: ExpertTable,
    out: DeviceArray,
    adds: bool,
) -> None:
    step = MOST_PAIRS // routing[0].shape[1]
    for start in range(0, len(x), step):
        part = slice(start, min(len(x), start + step))
        with ops.scope():
            chosen, shares = (each[part] for each in routing)
            inner = _inner(ops, x[part], chosen, table)
            _down(ops, inner, (chosen, shares), table, out[part], adds)


def _inner(ops: Launcher, x: DeviceArray, chosen: DeviceArray, table: ExpertTable) -> DeviceArray:
    """silu(gate x) * up x of each chosen expert, [T * used, F]."""
    if table.gate.type_name == table.up.type_name:
        return _up(ops, x, chosen, table, table.gate, GATE, is_glu=True)
    gate = _up(ops, x, chosen, table, table.gate, GATE, is_glu=False)
    up = _up(ops, x, chosen, table, table.up, UP, is_glu=False)
    out = ops.scratch(gate.shape)
    pointers = gate.ptr, up.ptr, out.ptr
    ops.kernel(JOIN)((_groups(out.size, 256),), 256, (*pointers, np.int64(out.size)))
    return out


def _up(
    ops: Launcher,
    x: DeviceArray,
    chosen: DeviceArray,
    table: ExpertTable,
    weight: CudaWeight,
    part: int,
    is_glu: bool,
) -> DeviceArray:
    _, rows, columns = weight.shape
    assert x.shape[1] == columns, (x, weight.shape)
    used, chunk = chosen.shape[1], CHUNKS[weight.type_name]
    warps = up_warps(chunk.name)
    out = ops.scratch((chosen.size, rows))
    shared = warps * (chunk.warp_bytes(1, ops.arch) + 2 * 64)
    numbers = used, columns, rows, part, int(is_glu), int(weight.is_tiled)
    ops.kernel(EXPERT_UP[weight.type_name])(
        (_groups(rows, 16 if is_glu else 32), chosen.size),
        32 * warps,
        (*table.args, chosen.ptr, x.ptr, out.ptr, *map(np.int32, numbers)),
        shared=shared,
    )
    return out


def _down(
    ops: Launcher,
    inner: DeviceArray,
    routing: tuple[DeviceArray, DeviceArray],
    table: ExpertTable,
    out: DeviceArray,
    adds: bool,
) -> None:
    weight, (chosen, weights) = table.down, routing
    _, rows, columns = weight.shape
    assert inner.shape[1] == columns, (inner, weight.shape)
    tokens, used = chosen.shape
    chunk = CHUNKS[weight.type_name]
    parts = 64 * used * _groups(columns, 32 * chunk.groups)
    numbers = used, columns, rows, int(adds), int(weight.is_tiled)
    pointers = chosen.ptr, weights.ptr, inner.ptr, out.ptr
    ops.kernel(EXPERT_DOWN[weight.type_name])(
        (_groups(rows, 16), tokens),
        32 * chunk.warps,
        (*table.args, *pointers, *map(np.int32, numbers)),
        shared=chunk.warps * chunk.warp_bytes(1, ops.arch) + parts,
    )


def gate_rows_(ops: Launcher, y: DeviceArray, x: DeviceArray, weight: CudaWeight) -> DeviceArray:
    assert weight.type_name == "F32", weight.type_name
    assert (len(y), weight.shape[-1]) == x.shape, (y, x, weight.shape)
    if y.size:
        numbers = np.int32(y.shape[1]), np.int32(x.shape[1])
        ops.kernel(GATE_ROWS)((len(y),), 256, (y.ptr, x.ptr, weight.ptr, *numbers))
    return y


def gate_(ops: Launcher, y: DeviceArray, gate: DeviceArray) -> DeviceArray:
    assert y.size == gate.size, (y, gate)
    if y.size:
        ops.kernel(GATE_VALUES)((_groups(y.size, 256),), 256, (y.ptr, gate.ptr, np.int64(y.size)))
    return y


def _groups(items: int, size: int) -> int:
    return -(-items // size)
