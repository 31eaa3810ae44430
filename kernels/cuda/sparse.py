"""Launchers of attention to chosen blocks: the indexer's cache, the choice, what is attended to.

Scratch does not grow with the context: scores of as many tokens as fit are made at once. Takes a
Launcher and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda import split
from voltapile.kernels.cuda.attention import LOG2E
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.pages import KINDS, PAGE_TOKENS, CudaKv
from voltapile.kernels.families import INDEX_RING, MAX_PROVISIONAL
from voltapile.kernels.ops import Batch


def _index(function: str) -> Instance:
    return Instance("sparse_index.cu", function, waits=True)


POOL, RING, SCORES = (_index(f"index_{name}") for name in ("pool", "ring", "scores"))
TILED = Instance("sparse_scores.cu", "index_scores_tiled", waits=True)
CHOOSE = Instance("sparse_choose.cu", "index_choose", waits=True)
DIMS, ANY = (64, 128, 256), 3  # of heads in shared memory; a cache of any type


def _attended(source: str, function: str, dim: int, kind: int) -> Instance:
    defines = (("HEAD_DIM", str(dim)), ("KIND", str(kind)))
    return Instance(source, function, defines, waits=True)


ATTEND = {
    (dim, kind): _attended("sparse_attend.cu", "attend_to", dim, kind)
    for dim in DIMS
    for kind in (KINDS["f16"], ANY)
}
JOIN = _attended("sparse_join.cu", "join_attended", DIMS[0], KINDS["f16"])
INSTANCES = [POOL, RING, SCORES, TILED, CHOOSE, *ATTEND.values(), JOIN]

SCORES_BYTES = 48 << 20  # of some tokens against all blocks
WIDEST_KEY = 256
KEYS = 16  # that a warp scores at once
CHOOSERS, CHOICE = 512, 30992  # of sparse_choose.cu: threads, and bytes of its Choice
ROUNDS, MOST_WARPS, TOKENS = 4, 16, 32  # of index_scores_tiled: tokens from sm_80 on
WARPS = 4  # of index_scores and attend_to
STEP, ROWS = 16, 16  # of attend_to: positions of a warp, and query heads of a block
JOINERS = 256  # threads of join_attended
PIECE = STEP * WARPS  # positions of a block where several have a token
FEWEST_PIECES = 1  # of prompt rows: there are blocks enough
MAX_TOKENS = 65535  # a grid's limit on its second axis


@dataclass(eq=False)
class IndexCache:
    """ring [page, position % INDEX_RING, dim]: the last keys; pooled [page, block in page, dim]."""

    ring: DeviceArray
    pooled: DeviceArray
    block: int

    @property
    def shift(self) -> int:
        """A block has 1 << shift positions."""
        return self.block.bit_length() - 1


@dataclass(eq=False)
class Chosen:
    """blocks: of each token, rising, [T, most]; of fewer the first alone. block: positions of one.
    How many there are follows from a token's position."""

    blocks: DeviceArray
    block: int


def index_cache(ops: Launcher, pages: int, page_tokens: int, dim: int, block: int) -> IndexCache:
    assert page_tokens % INDEX_RING == INDEX_RING % block == 0, "a block lies in one page"
    assert page_tokens == PAGE_TOKENS, page_tokens
    assert dim % 4 == 0, dim
    assert dim <= WIDEST_KEY, dim
    ring = ops.zeros((pages, INDEX_RING, dim), np.float32)
    return IndexCache(ring, ops.zeros((pages, page_tokens // block, dim), np.float32), block)


def page_parts(cache: IndexCache) -> tuple[DeviceArray, DeviceArray]:
    """Arrays whose first axis is the page."""
    return cache.ring, cache.pooled


@dataclass(frozen=True)
class Queries:
    """An indexer's, of a step, which its key's launch norms and turns: q [T, heads * dim]; angles
    [T, pairs, 2]."""

    q: DeviceArray
    norm: CudaWeight
    angles: DeviceArray


def index_store(
    ops: Launcher,
    cache: IndexCache,
    keys: DeviceArray,
    norm: CudaWeight,
    rope: tuple[np.ndarray, float],
    batch: Batch,
    group: int,
    eps: float,
    queries: Queries | None = None,
) -> DeviceArray:
    """Queries as they become, or keys."""
    (tokens, dim), table = keys.shape, batch.pages[group]
    frequencies = ops.constant(np.asarray(rope[0], np.float32))
    assert cache.ring.shape[2] == dim == norm.shape[0], (cache.ring, keys, norm.shape)
    assert 2 * len(frequencies) <= dim, (frequencies, dim)
    found, heads, asked = keys, 0, (0, 0, 0, 0)
    if queries is not None:
        q, heads = queries.q, queries.q.shape[1] // dim
        assert q.shape == (tokens, heads * dim), (q, dim)
        assert queries.norm.shape == (dim,), queries.norm.shape
        assert queries.angles.shape == (tokens, len(frequencies), 2), queries.angles
        found = ops.scratch(q.shape)
        asked = q.ptr, queries.norm.ptr, queries.angles.ptr, found.ptr
    if not tokens:
        return found
    where = table.shape[1], len(cache.ring)
    tables, long_rows = (table, batch.slots, batch.positions), batch.long_rows
    is_short = long_rows == 0 if long_rows >= 0 else tokens <= MAX_PROVISIONAL
    # One launch, if no token takes the place of a key that another one of its slot reads.
    stores = is_short and cache.block + MAX_PROVISIONAL <= INDEX_RING
    ops.kernel(POOL)(
        (tokens, 1 + _groups(heads, WARPS)),
        128,
        (
            *_pointers(keys, norm, frequencies, cache.ring, cache.pooled, *tables),
            *asked,
            *map(np.int32, (heads, dim, cache.shift, *where, len(frequencies), stores)),
            *(np.float32(rope[1]), np.float32(eps)),
        ),
    )
    if not stores:
        ops.kernel(RING)(
            (tokens,),
            128,
            (*_pointers(keys, cache.ring, *tables), *map(np.int32, (tokens, dim, *where))),
        )
    return found


def choose_blocks(
    ops: Launcher,
    q: DeviceArray,
    cache: IndexCache,
    batch: Batch,
    group: int,
    heads: int,
    top_k: int,
) -> Chosen:
    tokens, table = len(q), batch.pages[group]
    dim, block, chosen = cache.ring.shape[2], cache.block, top_k // cache.block
    assert q.shape == (tokens, heads * dim), (q, heads, dim)
    most = table.shape[1] * PAGE_TOKENS // block
    blocks = ops.scratch((tokens, chosen), np.int32)
    step, generated = max(1, min(MAX_TOKENS, SCORES_BYTES // (4 * most))), batch.generated
    for first, last in (0, generated), (generated, tokens):
        for start in range(first, min(last, tokens), step):
            part = slice(start, min(last, tokens, start + step))
            where = batch.slots[part], batch.positions[part]
            with ops.scope():
                scores = ops.scratch((len(where[0]), most))
                if most > chosen:
                    score(ops, q[part], cache, table, where, scores, chosen, start >= generated)
                choose(ops, scores, where[1], blocks[part], cache.shift)
    return Chosen(blocks, block)


def score(
    ops: Launcher,
    q: DeviceArray,
    cache: IndexCache,
    table: DeviceArray,
    where: tuple[DeviceArray, DeviceArray],
    scores: DeviceArray,
    chosen: int,
    is_prompt: bool,
) -> None:
    """scores [T, blocks] of tokens that see more than `chosen` of them.

    where: slots, positions. is_prompt: a score's bits depend on this, and on no other token.
    """
    (tokens, most), dim = scores.shape, cache.ring.shape[2]
    heads, together = q.shape[1] // dim, TOKENS if ops.arch >= 80 else TOKENS // 2
    row = 2 * (2 * dim + 8)  # bytes: two halves for each float
    warps = min(MOST_WARPS, (max_shared(ops.arch) // row - heads * together) // KEYS)
    arrays = _pointers(q, cache.pooled, table, *where, scores)
    sizes = heads, dim, cache.shift, table.shape[1], len(cache.ring), most, chosen
    if is_prompt and warps > 0 and dim % 16 == 0:
        ops.kernel(TILED)(
            (_groups(most, ROUNDS * KEYS * warps), _groups(tokens, together)),
            32 * warps,
            (*arrays, *map(np.int32, (tokens, *sizes))),
            shared=row * (heads * together + KEYS * warps),
        )
        return
    ops.kernel(SCORES)(
        (_groups(most, KEYS * WARPS), tokens), 32 * WARPS, (*arrays, *map(np.int32, sizes))
    )


def choose(
    ops: Launcher, scores: DeviceArray, positions: DeviceArray, blocks: DeviceArray, shift: int
) -> None:
    """blocks [T, chosen]: where scores [T, blocks] are the largest, of equal ones the first."""
    (tokens, most), chosen = scores.shape, blocks.shape[1]
    assert most % 4 == 0, most
    shared = CHOICE + 8 * _groups(most, 32)
    if shared > max_shared(ops.arch):
        raise ValueError(
            f"too long a context for this GPU: {most} blocks of positions to choose of"
        )
    ops.kernel(CHOOSE)(
        (tokens,),
        CHOOSERS,
        (*_pointers(scores, positions, blocks), *map(np.int32, (shift, most, chosen))),
        shared=shared,
    )


@dataclass(frozen=True)
class _Call:
    """What all launches of one attention share."""

    chosen: Chosen
    q: DeviceArray
    cache: CudaKv
    batch: Batch
    table: DeviceArray
    heads: DeviceArray  # int32: where each KV head's query heads begin and end, then those
    num_heads: int
    parts: int  # of a KV head's query heads, ROWS in each
    scale: float
    out: DeviceArray
    gate: tuple[int, int] | None  # where gates of rows are, and from one to the next

    @property
    def most(self) -> int:
        """Blocks of a token."""
        return self.chosen.blocks.shape[1]

    @property
    def cache_numbers(self) -> tuple[int, ...]:
        cache = self.cache
        kinds = KINDS[cache.key_type], KINDS[cache.value_type]
        return cache.kv_heads, self.num_heads, cache.key_dim, cache.value_dim, *kinds


def attention_to(
    ops: Launcher,
    chosen: Chosen,
    q: DeviceArray,
    cache: CudaKv,
    batch: Batch,
    group: int,
    head_map: Sequence[int],
    scale: float,
    gate: DeviceArray | None = None,
) -> DeviceArray:
    """Rows that were generated are cut to pieces, so that many blocks share one; others are not."""
    tokens, heads, table = len(q), len(head_map), batch.pages[group]
    assert q.size == tokens * heads * cache.key_dim, (q.shape, heads, cache.key_dim)
    out = ops.scratch((tokens, heads * cache.value_dim))
    map_values, members = _heads_of(head_map, cache.kv_heads)
    own = ops.constant(map_values), heads, _groups(members, ROWS)
    assert gate is None or gate.shape == out.shape, (gate, out)
    gates = None if gate is None else split.gate_place(gate, cache.value_dim)
    call = _Call(chosen, q, cache, batch, table, *own, scale, out, gates)
    generated = min(tokens, batch.generated)
    longest = (call.most + 1) * chosen.block
    longest = min(longest, table.shape[1] * 64)
    parts = (0, generated, _groups(longest, PIECE)), (generated, tokens, FEWEST_PIECES)
    for first, last, pieces in parts:
        step = MAX_TOKENS if pieces == 1 else max(1, 256 // pieces)
        for start in range(first, last, step):
            with ops.scope():
                _attend(ops, call, slice(start, min(last, start + step)), pieces)
    return out


def _attend(ops: Launcher, call: _Call, part: slice, pieces: int) -> None:
    cache, chosen, out = call.cache, call.chosen, call.out[part]
    tokens, heads, dim = len(out), call.num_heads, cache.value_dim
    found, stats = out, out  # stats: of pieces alone
    if pieces > 1:
        found = ops.scratch((tokens, heads, pieces, dim))
        stats = ops.scratch((tokens, heads, pieces, 2))
    of_tokens = call.batch.slots, call.batch.positions, chosen.blocks
    shift = chosen.block.bit_length() - 1
    numbers = call.table.shape[1], cache.pages, shift, call.most, pieces, PIECE, call.parts
    shape = _shape_of(cache)
    blocks = call.most if pieces == 1 else PIECE // chosen.block
    ops.kernel(ATTEND[shape])(
        (cache.kv_heads * call.parts * pieces, tokens),
        32 * WARPS,
        (
            *_pointers(call.q[part], cache.keys, cache.values, call.table),
            *_pointers(*(each[part] for each in of_tokens), call.heads, found, stats),
            *map(np.int32, (*call.cache_numbers, *numbers)),
            np.float32(call.scale * LOG2E),
        ),
        shared=_shared_bytes(*shape, ops.arch) + 4 * (blocks + 2),
    )
    place, apart = call.gate or (0, 0)
    own_gate = place and place + 4 * part.start * heads * apart
    if pieces > 1:
        ops.kernel(JOIN)(
            (heads, tokens),
            JOINERS,
            (*_pointers(found, stats), own_gate, out.ptr, *map(np.int32, (pieces, dim, apart))),
            shared=4 * pieces,
        )
    elif call.gate:
        split.gate_(ops, out, (own_gate, apart), dim)


def _shape_of(cache: CudaKv) -> tuple[int, int]:
    """(width, KIND) of the kernel that serves it."""
    wide = max(cache.key_dim, cache.value_dim)
    dim = next(each for each in DIMS if each >= wide)
    is_plain = cache.key_type == cache.value_type == "f16" and cache.key_dim == cache.value_dim
    return dim, KINDS["f16"] if is_plain and dim == wide else ANY


def _shared_bytes(dim: int, kind: int, arch: int) -> int:
    """Of csrc/sparse_attend.cu's Shared."""
    row = 2 * (dim + 8)
    tiles = (2 if arch >= 80 and kind == KINDS["f16"] else 1) * WARPS * STEP * row
    ends = 8 * WARPS * 4 * (dim + 8)
    return max(tiles, ends) + ROWS * (row + 4)


def _heads_of(head_map: Sequence[int], kv_heads: int) -> tuple[np.ndarray, int]:
    """Where each KV head's query heads begin and end, then those; and the most of one."""
    order = np.argsort(np.asarray(head_map), kind="stable")
    counts = np.bincount(np.asarray(head_map), minlength=kv_heads)
    values = np.concatenate([[0], np.cumsum(counts), order])
    return values.astype(np.int32), int(counts.max())


def _pointers(*arrays: DeviceArray | CudaWeight) -> tuple[int, ...]:
    return tuple(array.ptr for array in arrays)


def _groups(items: int, size: int) -> int:
    return -(-items // size)
