"""Launchers of chosen experts of generated rows from sm_80 on: csrc/expert_{up_stream,down_stream,
parts}.cu.

Which formats it takes, and what a block holds in shared memory. Nothing here changes bits: neither
how many tokens share a block, nor how many warps it has, nor which kernels sum up. Takes a Launcher
and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.expert_groups import join
from voltapile.kernels.cuda.expert_sizes import (
    SLOTS,
    chunks,
    depth_of,
    groups,
    room_for,
    strip_bytes,
    tile_bytes,
    whole,
)
from voltapile.kernels.cuda.expert_table import ExpertTable, Shared
from voltapile.kernels.cuda.launch import DeviceArray, Instance, Launcher, Line
from voltapile.kernels.cuda.spread import spread

ARCH = 80  # from which on
UP_WARPS = PARTS_WARPS = 4
ONE_WARPS = 8  # of a block of expert_up_stream for one token, of which a multiprocessor has one
# Bytes of a warp's ring, most: of expert_up_stream the first with which a block of
# expert_down_stream fits beside three of these (which it need not with five tokens), so that its
# weights come next.
UP_RINGS, PARTS_RING = (11264, 6912), 6912
BESIDE = 3  # blocks of expert_up_stream
# Of a block, most, with an expert that all take and without: where there is one block of each
# multiprocessor at most; where they share.
DOWN_WARPS, DOWN_SHARING = (18, 24), 12
# Bytes of shared memory that sources name, most, and that the hardware takes of a block.
NAMED, UP_NAMED, RESERVED = 1024, 128, 1024
STRIP = 8  # tiles of 16 rows of a block of expert_parts
MOST_USED = 32  # experts of a token: csrc/expert_down_stream.cu
FEW = 5  # tokens, for which blocks are small and a token's experts are summed up by one block
UNITS = 2  # of 16 rows of a block of expert_up_stream, for more tokens
Inner = tuple[DeviceArray, DeviceArray | None]  # of routed experts, and of the shared one
Routing = tuple[DeviceArray, DeviceArray]
MOST_PAIRS = 32768  # of a launch: half of a grid's second axis, the rest is for the shared expert

# Formats of routed experts, and of the expert that every token takes.
UP_PAIRS = [
    *((name, name) for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0")),
    *(("Q4_K", other) for other in ("Q5_K", "Q6_K", "Q8_0")),
    *(("Q5_K", other) for other in ("Q6_K", "Q8_0")),
]
DOWN_PAIRS = [
    *((name, name) for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q5_1")),
    *(("Q4_K", other) for other in ("Q5_K", "Q6_K", "Q8_0")),
    *(("Q5_K", other) for other in ("Q6_K", "Q8_0")),
    *(("Q6_K", other) for other in ("Q5_K", "Q8_0")),
    ("Q5_1", "Q8_0"),
]

PARTS_PAIRS = [(name, other) for name, other in DOWN_PAIRS if name != "Q5_1"]  # it has no tiles


def _instances(
    function: str, pairs: list[tuple[str, str]], **defines: int
) -> dict[tuple[tuple[str, str], bool], Instance]:
    """By formats, and whether there is no expert that every token takes, nor code for it."""
    alone = [(pair, True) for pair in pairs if pair[0] == pair[1]]
    keys = [*((pair, False) for pair in pairs), *alone]
    return {key: _instance(function, *key, defines) for key in keys}


def _instance(
    function: str, pair: tuple[str, str], is_alone: bool, own: dict[str, int]
) -> Instance:
    defines = {"FORMAT": pair[0], "OTHER": pair[1], **own, "TILES": 1, "MANY": 0}
    defines |= {"ALONE": 1} if is_alone else {}
    named = tuple((key, str(value)) for key, value in defines.items())
    return Instance(f"{function}.cu", function, named, is_exact=True, waits=True)


UP = _instances("expert_up_stream", UP_PAIRS, WARPS=UP_WARPS)
ONE = _instances("expert_up_stream", UP_PAIRS, WARPS=ONE_WARPS, ONE=1)
DOWN = _instances("expert_down_stream", DOWN_PAIRS, WARPS=DOWN_WARPS[0])
PARTS = _instances("expert_parts", PARTS_PAIRS, WARPS=PARTS_WARPS, STRIP=STRIP)
# Of a rank's part of a sum, which is made there, too.
TAILS = {each: replace(each, defines=(*each.defines, ("TAIL", "1"))) for each in DOWN.values()}
INSTANCES = [*UP.values(), *ONE.values(), *DOWN.values(), *PARTS.values(), *TAILS.values()]


@dataclass(frozen=True)
class Way:
    """How expert_up_stream is launched: tokens and units of 16 rows of a block, its grid but for
    pairs of a token and an expert; bytes of a warp's ring and of a block."""

    instances: dict[tuple[tuple[str, str], bool], Instance]
    warps: int
    room: int
    units: int
    other_units: int
    columns: int
    turns: int
    ring: int
    nbytes: int


@dataclass(frozen=True)
class Layer:
    """What a layer computes here, and what blocks hold in shared memory for it."""

    table: ExpertTable
    shared: Shared | None

    @property
    def is_alone(self) -> bool:
        return self.shared is None

    @property
    def up_pair(self) -> tuple[str, str]:
        name = self.table.gate.type_name
        return name, name if self.shared is None else self.shared.gate.type_name

    @property
    def down_pair(self) -> tuple[str, str]:
        name = self.table.down.type_name
        return name, name if self.shared is None else self.shared.down.type_name

    @property
    def shared_columns(self) -> int:
        """Of its down matrix."""
        return 0 if self.shared is None else self.shared.down.shape[1]

    @property
    def others(self) -> int:
        """Units of 16 rows of its gate."""
        return 0 if self.shared is None else self.shared.gate.shape[0] // 16

    @property
    def down_tiled(self) -> tuple[bool, bool]:
        shared = self.shared is not None and self.shared.down.is_tiled
        return self.table.down.is_tiled, shared

    @property
    def has_parts(self) -> bool:
        """Whether expert_parts takes what this layer's down matrices are."""
        return all(self.down_tiled[: 1 if self.is_alone else 2]) and self.down_pair in PARTS_PAIRS

    def fits(self, used: int, most: int) -> bool:
        """It depends on nothing that changes from step to step."""
        if self.table.gate.type_name != self.table.up.type_name:
            return False
        if self.up_pair not in UP_PAIRS or self.down_pair not in DOWN_PAIRS or used > MOST_USED:
            return False
        if self.shared is not None and self.shared.gate.type_name != self.shared.up.type_name:
            return False
        ups = [self.table.gate, self.table.up]
        ups += [] if self.shared is None else [self.shared.gate, self.shared.up]
        if not all(each.is_tiled for each in ups) or self.table.down.shape[1] % 16:
            return False
        needed = [self.up_bytes(1, UNITS, UP_RINGS[-1]), self.down_bytes(used)]
        needed += [self.parts_bytes(1)] if self.has_parts else []
        return max(needed) + NAMED <= most

    def up_bytes(self, room: int, units: int, ring: int) -> int:
        columns = self.table.gate.shape[2]
        before = (0, 0 if self.is_alone else whole(4 * room * chunks(columns)))
        places = (16 * self.table.count, 0)
        return max(
            first + strip_bytes(name, columns, room, 2 * units, UP_WARPS, ring, least)
            for name, first, least in zip(self.up_pair, before, places, strict=True)
        )

    def one_bytes(self, units: tuple[int, int], ring: int) -> int:
        """As up_bytes, of one token: places lie behind what comes."""
        columns = self.table.gate.shape[2]
        before = 16 * self.table.count, whole(4 * chunks(columns)) * (not self.is_alone)
        return max(
            first + strip_bytes(name, columns, 1, 2 * count, ONE_WARPS, ring)
            for name, count, first in zip(self.up_pair, units, before, strict=True)
        )

    def up_ring(
        self, rings: tuple[int, ...], nbytes: Callable[[int], int], beside: int, most: int
    ) -> int:
        """Bytes of a warp's ring. nbytes: of all blocks with such rings; beside: of others."""
        for ring in rings[:-1]:
            if nbytes(ring) + beside <= most:
                return ring
        return rings[-1]

    def up_way(self, tokens: int, used: int, ops: Launcher) -> Way:
        if tokens == 1 and (way := self.one_way(used, ops)) is not None:
            return way
        units, most = 1 if tokens <= FEW else UNITS, max_shared(ops.arch)
        room = room_for(lambda room: self.up_bytes(room, units, UP_RINGS[-1]), tokens, ops.arch)
        ring = self.up_ring(
            UP_RINGS,
            lambda ring: BESIDE * (self.up_bytes(room, units, ring) + UP_NAMED + RESERVED),
            self.down_bytes(used) + NAMED,
            most,
        )
        columns = groups(max(self.table.gate.shape[1], 16 * self.others), 16 * units)
        turns = 0 if self.is_alone else groups(tokens, room)
        nbytes = self.up_bytes(room, units, ring)
        return Way(UP, UP_WARPS, room, units, units, columns, turns, ring, nbytes)

    def one_way(self, used: int, ops: Launcher) -> Way | None:
        """Of one token: as many units as make one block of each multiprocessor."""
        most, total = max_shared(ops.arch), self.table.gate.shape[1] // 16
        rows = used + (not self.is_alone)
        for units in range(1, total + 1):
            if (columns := groups(total, units)) * rows <= ops.multiprocessors:
                break
        turns = 0
        if self.others:  # as many as find room, but none that has nothing to do
            most_turns = ops.multiprocessors // columns - used
            turns = max(1, min(most_turns, groups(self.others, columns)))
        others = groups(self.others, columns * max(1, turns))
        ring = self.up_ring(
            UP_RINGS,
            lambda ring: self.one_bytes((units, others), ring) + UP_NAMED + RESERVED,
            self.down_bytes(used) + NAMED,
            most,
        )
        nbytes = self.one_bytes((units, others), ring)
        nbytes += spread(ops, columns * (used + turns), nbytes)
        if nbytes + UP_NAMED > most:
            return None
        return Way(ONE, ONE_WARPS, 1, units, others, columns, turns, ring, nbytes)

    def down_items(self, used: int) -> int:
        return used * chunks(self.table.down.shape[2]) + chunks(self.shared_columns)

    def down_warps(self, used: int, shares: bool = False) -> int:
        """Each with as many items; four add up. shares: multiprocessors have several blocks."""
        items, most = self.down_items(used), DOWN_WARPS[self.is_alone]
        return max(4, groups(items, groups(items, min(most, DOWN_SHARING) if shares else most)))

    def down_bytes(self, used: int) -> int:
        """Tiles, a token's chunk for each warp, items' sums."""
        own, other = self.down_pair
        tiles = used * tile_bytes(own, self.table.down.shape[2])
        tiles += tile_bytes(other, self.shared_columns) * (not self.is_alone)
        slots = self.down_warps(used) * max(SLOTS[own], SLOTS[other])
        return tiles + slots + 64 * self.down_items(used)

    def parts_bytes(self, room: int) -> int:
        pairs = zip(self.down_pair, (self.table.down.shape[2], self.shared_columns), strict=True)
        return max(strip_bytes(*each, room, STRIP, PARTS_WARPS, PARTS_RING) for each in pairs)

    def down_args(self, inner: DeviceArray | None) -> tuple[int | np.int32, ...]:
        """Of the shared expert."""
        if self.shared is None or inner is None:
            return 0, 0
        down = self.shared.down
        assert down.shape == (self.table.down.shape[1], inner.shape[1]), (down.shape, inner)
        return down.ptr, inner.ptr


def fits(ops: Launcher, table: ExpertTable, shared: Shared | None, used: int) -> bool:
    return ops.arch >= ARCH and Layer(table, shared).fits(used, max_shared(ops.arch))


def experts(
    ops: Launcher,
    x: DeviceArray,
    routing: tuple[DeviceArray, DeviceArray],
    table: ExpertTable,
    shared: Shared | None,
    out: DeviceArray,
    adds: bool,
) -> None:
    layer, step = Layer(table, shared), MOST_PAIRS // routing[0].shape[1]
    for start in range(0, len(x), step):
        stop = min(len(x), start + step)
        own = routing[0][start:stop], routing[1][start:stop]
        with ops.scope():
            inner = _up(ops, x[start:stop], own[0], layer)
            down = _down if stop - start <= FEW or not layer.has_parts else _parts
            down(ops, inner, own, layer, out[start:stop], adds)


def begun(
    ops: Launcher,
    x: DeviceArray,
    routing: tuple[DeviceArray, DeviceArray],
    table: ExpertTable,
    shared: Shared | None,
) -> Callable[[DeviceArray, bool, Line], None] | None:
    """What ends it (tails.py), and has to be the next launch. None if down is not
    expert_down_stream's; then nothing has begun."""
    if not 0 < len(x) <= FEW or not fits(ops, table, shared, routing[0].shape[1]):
        return None
    layer = Layer(table, shared)
    with ops.scope():  # what comes after the end waits for it, and may have the memory
        inner = _up(ops, x, routing[0], layer)
    return lambda out, adds, line: _down(ops, inner, routing, layer, out, adds, line)


def _up(ops: Launcher, x: DeviceArray, chosen: DeviceArray, layer: Layer) -> Inner:
    """silu(gate x) * up x of each chosen expert, [T * used, F], and of the one that all take."""
    (tokens, columns), (_, rows, own_columns) = x.shape, layer.table.gate.shape
    assert columns == own_columns, (x, layer.table.gate.shape)
    way = layer.up_way(tokens, chosen.shape[1], ops)
    depths = (np.int32(depth_of(name, way.ring)) for name in layer.up_pair)
    inner, other = ops.scratch((chosen.size, rows)), None
    other_args: tuple[int, ...] = 0, 0, 0, 0
    other_rows = 0
    if (shared := layer.shared) is not None:
        other_rows = shared.gate.shape[0]
        assert shared.gate.shape == shared.up.shape == (other_rows, columns), shared
        other = ops.scratch((tokens, other_rows))
        router = shared.router.ptr if shared.router is not None else 0
        other_args = shared.gate.ptr, shared.up.ptr, router, other.ptr
    numbers = tokens, chosen.shape[1], columns, rows, way.room, way.units
    ops.kernel(way.instances[layer.up_pair, layer.is_alone])(
        (way.columns, chosen.size + way.turns),
        32 * way.warps,
        (
            *(*layer.table.args, chosen.ptr, x.ptr, inner.ptr, *map(np.int32, numbers)),
            *(next(depths), *other_args, np.int32(other_rows), next(depths)),
            np.int32(way.other_units),
        ),
        shared=way.nbytes,
    )
    return inner, other


def _down(
    ops: Launcher,
    inner: Inner,
    routing: Routing,
    layer: Layer,
    out: DeviceArray,
    adds: bool,
    line: Line = (),
) -> None:
    """Right behind expert_up_stream: the choice is there before that ends."""
    (chosen, shares), (_, rows, columns) = routing, layer.table.down.shape
    tokens, used = chosen.shape
    tiled, shared_tiled = layer.down_tiled
    numbers = used, columns, rows, int(adds), tiled + 2 * shared_tiled
    kind = DOWN[layer.down_pair, layer.is_alone]
    units = rows // 16
    ops.kernel(TAILS[kind] if line else kind)(
        (tokens, units) if line else (units, tokens),
        32 * layer.down_warps(used, units * tokens > ops.multiprocessors),
        (
            *(*layer.table.args, chosen.ptr, shares.ptr, inner[0].ptr, out.ptr),
            *(*map(np.int32, numbers), *layer.down_args(inner[1]), np.int32(layer.shared_columns)),
            *line,
        ),
        shared=layer.down_bytes(used),
    )


def _parts(
    ops: Launcher, inner: Inner, routing: Routing, layer: Layer, out: DeviceArray, adds: bool
) -> None:
    (chosen, shares), (_, rows, columns) = routing, layer.table.down.shape
    tokens, used = chosen.shape
    room = room_for(layer.parts_bytes, tokens, ops.arch)
    parts, other, turns = ops.scratch((chosen.size, rows)), None, 0
    if layer.shared is not None:
        other, turns = ops.scratch((tokens, rows)), groups(tokens, room)
    depth, other_depth = (depth_of(name, PARTS_RING) for name in layer.down_pair)
    numbers = tokens, used, columns, rows, room, depth
    ops.kernel(PARTS[layer.down_pair, layer.is_alone])(
        (groups(rows, 16 * STRIP), chosen.size + turns),
        32 * PARTS_WARPS,
        (
            *(*layer.table.args, chosen.ptr, inner[0].ptr, parts.ptr, *map(np.int32, numbers)),
            *(*layer.down_args(inner[1]), 0 if other is None else other.ptr),
            *map(np.int32, (layer.shared_columns, other_depth)),
        ),
        shared=layer.parts_bytes(room),
    )
    here = np.int32(layer.table.count), np.int32(layer.table.first)
    join(ops, (chosen, shares), parts, other, out, here, adds)
