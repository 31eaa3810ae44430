"""Launchers of attention over paged keys and values.

Runs of few tokens of a slot (generated rows) always take the kernel that cuts positions into
pieces, and longer ones the prompt kernel, so that a generated row's bits depend on nothing beside
it. Takes a Launcher and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda.attention_sizes import (
    ANY,
    CLUSTERS_FROM,
    SHARES,
    STRANDS,
    decode_shared,
    prefill_block,
    prefill_shared,
)
from voltapile.kernels.cuda.launch import DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.pages import (
    KINDS,
    LARGEST_DIM,
    PAGE_TOKENS,
    STORE,
    TICKETS,
    CudaKv,
    kv_cache,
    page_parts,
    store_kv,
)
from voltapile.kernels.ops import Batch

__all__ = ["attention", "kv_cache", "page_parts", "store_kv"]

HEAD_DIMS = (64, 80, 96, 128, 256)  # that have kernels of their own

SHORT_RUN = 8  # tokens of a slot in a step that count as generated
MOST_GENERATED = 64  # tokens of a step that may all be generated
PARTIAL_BYTES = 64 << 20  # what the pieces of one launch may take, if one token's do not take more
PIECES = 512  # of all KV heads together, for long contexts: enough to fill a GPU
# The same, of clusters, so that all blocks are there at once on 132 multiprocessors: those of large
# heads, or of kernels that are told types, are two on a multiprocessor, others three.
CLUSTERS, LARGE_CLUSTERS = 40, 30
MANY_PIECES = 32  # of several tokens, if each has one: then a block takes a whole piece
LOG2E = 1.4426950408889634

LITTLE_SHARED = dict.fromkeys((86, 89, 120), 99 << 10)  # bytes a block, of cards from sm_80 on

PLAN = Instance("attention_plan.cu", "attention_plan")


def _shapes() -> list[tuple[int, int]]:
    """(width of a head in shared memory, KIND) of all kernels."""
    own = [(dim, KINDS["f16"]) for dim in HEAD_DIMS]
    own += [(dim, KINDS["q8_0"]) for dim in HEAD_DIMS if dim % 32 == 0]
    return [*own, (128, ANY), (256, ANY)]


def row_tiles(dim: int, kind: int) -> tuple[int, ...]:
    """Which numbers of 16 rows a block of attention_decode may have; registers set the limit."""
    if kind == ANY or dim > 128:
        return (1,)
    return (1, 2, 4) if dim <= 64 else (1, 2)


def _defines(dim: int, kind: int) -> tuple[tuple[str, str], ...]:
    return ("HEAD_DIM", str(dim)), ("KIND", str(kind))


def _clusters(dim: int, kind: int, tiles: int) -> tuple[int, ...]:
    """Blocks that may take a piece together; registers set the limit of what one can do."""
    return (SHARES, 1) if kind != ANY and dim <= 128 and tiles == 1 else (SHARES,)


DECODE = {
    (dim, kind, tiles, blocks): Instance(
        "attention_decode.cu",
        "attention_decode",
        (*_defines(dim, kind), ("ROW_TILES", str(tiles)), ("CLUSTER", str(blocks))),
        waits=True,
    )
    for dim, kind in _shapes()
    for tiles in row_tiles(dim, kind)
    for blocks in _clusters(dim, kind, tiles)
}
PREFILL = {
    (dim, kind): Instance("attention_prefill.cu", "attention_prefill", _defines(dim, kind))
    for dim, kind in _shapes()
}
INSTANCES = [STORE, PLAN, *DECODE.values(), *PREFILL.values()]


def shape_of(cache: CudaKv) -> tuple[int, int]:
    """(width, KIND) of the kernels that serve it."""
    if (cache.key_dim, cache.key_type) == (cache.value_dim, cache.value_type):
        own = cache.key_dim, KINDS[cache.key_type]
        if own in PREFILL:
            return own
    return 128 if max(cache.key_dim, cache.value_dim) <= 128 else LARGEST_DIM, ANY


@dataclass(frozen=True)
class _Call:
    """What all launches of one attention share."""

    q: DeviceArray
    out: DeviceArray
    cache: CudaKv
    batch: Batch
    table: DeviceArray
    heads: DeviceArray  # int32: where each KV head's query heads begin, then those
    num_heads: int
    members: int  # most query heads of a KV head
    is_even: bool  # each has as many, in their order
    scale: float
    softcap: float
    window: int
    weights: DeviceArray | None

    @property
    def tokens(self) -> int:
        return len(self.batch.slots)

    @property
    def width(self) -> int:
        return self.table.shape[1]

    @property
    def limit(self) -> int:
        """Positions that a page table has room for."""
        return self.width * PAGE_TOKENS

    @property
    def factors(self) -> tuple[np.float32, np.float32]:
        """scale and cap as finish_scores takes them (attention_tile.cuh)."""
        if self.softcap:
            return np.float32(self.scale / self.softcap), np.float32(self.softcap * LOG2E)
        return np.float32(self.scale * LOG2E), np.float32(0)

    @property
    def decode_shape(self) -> tuple[int, int]:
        """(width, KIND) of attention_decode: soft caps are rare, and one kernel knows them."""
        dim, kind = shape_of(self.cache)
        return (128 if dim <= 128 else LARGEST_DIM, ANY) if self.softcap else (dim, kind)

    @property
    def weights_ptr(self) -> int:
        return self.weights.ptr if self.weights is not None else 0

    @property
    def cache_numbers(self) -> tuple[int, ...]:
        cache = self.cache
        kinds = KINDS[cache.key_type], KINDS[cache.value_type]
        return cache.kv_heads, self.num_heads, cache.key_dim, cache.value_dim, *kinds


def attention(
    ops: Launcher,
    q: DeviceArray,
    cache: CudaKv,
    batch: Batch,
    group: int,
    head_map: Sequence[int],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    weights: DeviceArray | None = None,
) -> DeviceArray:
    """weights: [T, H], where log(sum(exp(score))) goes if somebody asks; a token at position -1
    sees nothing then."""
    tokens, heads = len(batch.slots), len(head_map)
    assert q.size == tokens * heads * cache.key_dim, (q.shape, tokens, heads)
    assert max(head_map) < cache.kv_heads, (head_map, cache.kv_heads)
    out = ops.scratch((tokens, heads * cache.value_dim))
    if tokens == 0:
        return out
    lists = np.asarray(heads_of(head_map, cache.kv_heads), np.int32)
    members = int(np.diff(lists[: cache.kv_heads + 1]).max())
    call = _Call(
        q=q,
        out=out,
        cache=cache,
        batch=batch,
        table=batch.pages[group],
        heads=ops.constant(lists),
        num_heads=heads,
        members=members,
        is_even=list(head_map) == [h // members for h in range(cache.kv_heads * members)],
        scale=scale,
        softcap=softcap,
        window=window,
        weights=weights,
    )
    with ops.scope():
        if is_generated(tokens, len(batch.outputs)):
            _decode(ops, call, 0, tokens, None)
        else:
            _mixed(ops, call)
    return out


def is_generated(tokens: int, outputs: int) -> bool:
    """Whether a step of that shape has only runs of generated rows. (If a prompt's rows are among
    them they are computed like generated ones.)"""
    return tokens <= SHORT_RUN or (outputs == tokens and tokens <= MOST_GENERATED)


def heads_of(head_map: Sequence[int], kv_heads: int) -> list[int]:
    """Where the query heads of each KV head begin, kv_heads + 1 numbers, then those heads."""
    own = [[h for h, kv in enumerate(head_map) if kv == head] for head in range(kv_heads)]
    starts = [sum(map(len, own[:head])) for head in range(kv_heads + 1)]
    return [*starts, *(h for each in own for h in each)]


def most_pieces(kv_heads: int, shape: tuple[int, int], arch: int) -> int:
    """Into how many pieces a token's positions are cut at most (one more behind a window); shape:
    of attention_decode."""
    if arch >= CLUSTERS_FROM:
        is_large = shape[0] > 128 or shape[1] == ANY
        return max(1, (LARGE_CLUSTERS if is_large else CLUSTERS) // kv_heads)
    return min(256, max(16, PIECES // kv_heads))


def shortest(arch: int) -> tuple[int, int]:
    """How many positions are one piece, and how many a piece has at least where there are several:
    WHOLE and LEAST in csrc/attention_rows.cuh."""
    return (2048, 1024) if arch >= CLUSTERS_FROM else (128, 128)


def _shares(arch: int) -> int:
    return SHARES if arch >= CLUSTERS_FROM else 1


def prefill_shape(cache: CudaKv, arch: int) -> tuple[int, int]:
    """(width, KIND) of the prompt kernel that fits the card."""
    dim, kind = shape_of(cache)
    if arch in LITTLE_SHARED and prefill_shared(dim, kind, arch) > LITTLE_SHARED[arch]:
        return 128 if dim <= 128 else LARGEST_DIM, ANY
    return dim, kind


def _decode(ops: Launcher, call: _Call, first: int, last: int, plan: DeviceArray | None) -> None:
    """Tokens first to last, or that many items of a plan."""
    dim, kind = call.decode_shape
    tiles = _tiles_for(call, dim, kind)
    chunk = _chunk(call.members, tiles)
    parts = _groups(chunk * call.members, 16 * tiles)
    most = most_pieces(call.cache.kv_heads, call.decode_shape, ops.arch)
    stride = _stride(most, *shortest(ops.arch), call.limit, call.window)
    pieces = stride + (1 if call.window else 0)  # tokens of an item begin at different ones
    each = 1 if plan is None else chunk  # rows for each token or item
    row_bytes = call.num_heads * stride * (call.cache.value_dim + 2) * 4
    batch = max(1, PARTIAL_BYTES // row_bytes // each)
    # Of a token or item; a row that is one piece is joined by nobody.
    tickets = call.cache.kv_heads * parts * 16 * tiles if pieces > 1 else 1
    batch = min(batch, last - first, max(1, TICKETS // tickets))
    partial = ops.scratch((batch * each * call.num_heads * stride, call.cache.value_dim))
    stats = ops.scratch((batch * each * call.num_heads * stride, 2))
    pointers = call.q, call.cache.keys, call.cache.values, call.table, call.batch.slots
    blocks = _blocks(call, batch, tiles, ops.arch)
    instance = DECODE[dim, kind, tiles, blocks]
    shared = decode_shared(dim, kind, tiles, ops.arch, blocks)
    plan_ptr = 0 if plan is None else plan.ptr
    for start in range(first, last, batch):
        stop = min(last, start + batch)
        numbers = start, stop, parts, *call.cache_numbers, call.width, call.cache.pages
        ends = call.window, most, stride, chunk
        ops.kernel(instance)(
            ((stop - start) * pieces * min(blocks, _shares(ops.arch)), call.cache.kv_heads * parts),
            32 * STRANDS,
            (
                *(array.ptr for array in pointers),
                *(call.batch.positions.ptr, call.heads.ptr, plan_ptr, partial.ptr, stats.ptr),
                *(call.cache.tickets.ptr, call.out.ptr, call.weights_ptr),
                *map(np.int32, numbers),
                *call.factors,
                *map(np.int32, (*ends, pieces, call.members if call.is_even else 0)),
            ),
            shared,
        )


def _mixed(ops: Launcher, call: _Call) -> None:
    """Short runs to attention_decode, the others to attention_prefill, as the device finds them."""
    chunk = _chunk(call.members, _tiles_for(call, *call.decode_shape))
    dim, kind = prefill_shape(call.cache, ops.arch)
    threads, rows = prefill_block(dim, kind, ops.arch)
    slots, tokens = call.table.shape[0], call.tokens
    # A slot has one run; a change of piece length may cut it once more.
    items = min(tokens, slots * (_groups(SHORT_RUN, chunk) + 1))
    tiles = tokens * call.members // rows + min(slots, tokens // (SHORT_RUN + 1))
    plan = ops.scratch((4 + 2 * tokens,), np.int32)
    tile_list = ops.scratch(
        (3 * (tokens * call.members // rows + tokens // SHORT_RUN + 1),), np.int32
    )
    limits = SHORT_RUN, call.members, rows, chunk, call.limit, call.window
    most = most_pieces(call.cache.kv_heads, call.decode_shape, ops.arch)
    numbers = tokens, *limits, most, items, tiles
    positions = call.batch.positions
    ops.kernel(PLAN)(
        (1,),
        32,
        (
            *(call.batch.slots.ptr, positions.ptr, plan.ptr, tile_list.ptr),
            *map(np.int32, numbers),
        ),
    )
    _decode(ops, call, 0, items, plan)
    if tiles == 0:
        return
    pointers = call.q, call.cache.keys, call.cache.values, call.table, call.batch.slots, positions
    ops.kernel(PREFILL[dim, kind])(
        (tiles, call.cache.kv_heads),
        threads,
        (
            *(array.ptr for array in pointers),
            *(call.heads.ptr, plan.ptr, tile_list.ptr, call.out.ptr, call.weights_ptr),
            *map(np.int32, (*call.cache_numbers, call.width, call.cache.pages)),
            *call.factors,
            np.int32(call.window),
        ),
        prefill_shared(dim, kind, ops.arch),
    )


def _tiles_for(call: _Call, dim: int, kind: int) -> int:
    """The least row tiles that hold all tokens that a slot has here, or the most there are. Where
    there are slots for all tokens each has its own, most likely."""
    choices, slots = row_tiles(dim, kind), call.table.shape[0]
    rows = (min(call.tokens, SHORT_RUN) if slots < call.tokens else 1) * call.members
    return next((tiles for tiles in choices if 16 * tiles >= rows), choices[-1])


def _blocks(call: _Call, tokens: int, tiles: int, arch: int) -> int:
    """Of a cluster, in a launch of so many tokens or items."""
    dim, kind = call.decode_shape
    pieces = tokens * call.cache.kv_heads if tokens > 1 else 0
    is_many = arch >= CLUSTERS_FROM and pieces >= MANY_PIECES
    return _clusters(dim, kind, tiles)[-1] if is_many else SHARES


def _chunk(members: int, tiles: int) -> int:
    """Tokens that one block of attention_decode takes."""
    return max(1, min(SHORT_RUN, 16 * tiles // members))


def _stride(most: int, whole: int, least: int, context: int, window: int) -> int:
    """Most pieces of one token."""
    if window:
        return min(most, _groups(min(context, window), whole)) + 1
    return 1 if context <= whole else min(most, _groups(context, least))


def _groups(items: int, size: int) -> int:
    return -(-items // size)
