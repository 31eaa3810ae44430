"""Launchers of paged attention: storing keys and values, attention over them, its page layout.

Runs of few tokens of a slot (generated rows) always take the kernel that cuts positions into
pieces, and longer ones the prompt kernel, so that a generated row's bits depend on nothing beside
it. Takes a Launcher and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda.launch import DeviceArray, Instance, Launcher
from voltapile.kernels.ops import Batch

PAGE_TOKENS = 64
KV_TYPES = {"f16": (1, 2), "q8_0": (16, 18), "q4_0": (32, 18)}  # values, bytes of a block
KINDS = {name: number for number, name in enumerate(KV_TYPES)}  # attention_kv.cuh
ANY = 3  # a kernel that is told dimensions and types when it runs; slower
HEAD_DIMS = (64, 80, 96, 128, 256)  # that have kernels of their own
LARGEST_DIM = 256

SHORT_RUN = 8  # tokens of a slot in a step that count as generated
MOST_GENERATED = 64  # tokens of a step that may all be generated
PARTIAL_BYTES = 64 << 20  # what the pieces of one launch may take, if one token's do not take more
PIECES = 512  # of all KV heads together at least, for long contexts: enough to fill a GPU
PIECE = 64  # positions of a piece, least
STRANDS = 4  # warps of a block that share its positions (csrc/attention_join.cuh)
MOST_PIECES = 257  # of a token, the same place
TICKETS = 4096  # blocks of one launch that add up pieces, most
LOG2E = 1.4426950408889634

LITTLE_SHARED = dict.fromkeys((86, 89, 120), 99 << 10)  # bytes a block, of cards from sm_80 on

STORE = Instance("attention_store.cu", "store_kv")
PLAN = Instance("attention_plan.cu", "attention_plan", (("PIECE", str(PIECE)),))


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


DECODE = {
    (dim, kind, tiles): Instance(
        "attention_decode.cu",
        "attention_decode",
        (*_defines(dim, kind), ("ROW_TILES", str(tiles)), ("PIECE", str(PIECE))),
        waits=True,
    )
    for dim, kind in _shapes()
    for tiles in row_tiles(dim, kind)
}
PREFILL = {
    (dim, kind): Instance("attention_prefill.cu", "attention_prefill", _defines(dim, kind))
    for dim, kind in _shapes()
}
INSTANCES = [STORE, PLAN, *DECODE.values(), *PREFILL.values()]


@dataclass(eq=False)
class CudaKv:
    """Keys and values of one layer; how they lie in a page is told in csrc/attention_kv.cuh."""

    keys: DeviceArray  # uint8 [pages, bytes]
    values: DeviceArray
    tickets: DeviceArray  # uint32 [TICKETS], zeros between two launches
    pages: int
    kv_heads: int
    key_dim: int
    value_dim: int
    key_type: str
    value_type: str

    @property
    def shape(self) -> tuple[int, int]:
        """(width, KIND) of the kernels that serve it."""
        if (self.key_dim, self.key_type) == (self.value_dim, self.value_type):
            own = self.key_dim, KINDS[self.key_type]
            if own in PREFILL:
                return own
        return 128 if max(self.key_dim, self.value_dim) <= 128 else LARGEST_DIM, ANY


def kv_cache(
    ops: Launcher,
    pages: int,
    kv_heads: int,
    page_tokens: int,
    key_dim: int,
    value_dim: int,
    key_type: str,
    value_type: str,
) -> CudaKv:
    if page_tokens != PAGE_TOKENS:
        raise ValueError(f"pages of {page_tokens} positions; the cuda backend has {PAGE_TOKENS}")
    token_bytes = [_kv_bytes(key_type, key_dim), _kv_bytes(value_type, value_dim)]
    keys, values = (
        ops.zeros((pages, kv_heads * page_tokens * each), np.uint8) for each in token_bytes
    )
    tickets = ops.zeros((TICKETS,), np.uint32)
    return CudaKv(keys, values, tickets, pages, kv_heads, key_dim, value_dim, key_type, value_type)


def page_parts(cache: CudaKv) -> tuple[DeviceArray, DeviceArray]:
    """Arrays whose first axis is the page."""
    return cache.keys, cache.values


def store_kv(
    ops: Launcher, cache: CudaKv, k: DeviceArray, v: DeviceArray, batch: Batch, group: int
) -> None:
    tokens, table = len(batch.slots), batch.pages[group]
    assert k.size == tokens * cache.kv_heads * cache.key_dim, (k.shape, tokens)
    assert v.size == tokens * cache.kv_heads * cache.value_dim, (v.shape, tokens)
    if tokens == 0:
        return
    warps = cache.kv_heads * (_groups(cache.key_dim, 32) + _groups(cache.value_dim, 32))
    numbers = table.shape[1], cache.pages, cache.kv_heads, cache.key_dim, cache.value_dim
    kinds = KINDS[cache.key_type], KINDS[cache.value_type]
    pointers = k, v, cache.keys, cache.values, table, batch.slots, batch.positions
    ops.kernel(STORE)(
        (_groups(warps, 4), tokens),
        128,
        (*(array.ptr for array in pointers), *map(np.int32, (*numbers, *kinds))),
    )


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
    scale: float
    softcap: float
    window: int

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
) -> DeviceArray:
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
        scale=scale,
        softcap=softcap,
        window=window,
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


def most_pieces(kv_heads: int) -> int:
    """Into how many pieces a token's positions are cut at most (one more behind a window)."""
    return min(256, max(16, PIECES // kv_heads))


def decode_shared(dim: int, kind: int, tiles: int, arch: int) -> int:
    """Bytes of struct Shared in attention_decode.cu."""
    rows, pitch, is_copied = 16 * tiles, dim + 8, arch >= 80 and kind != ANY
    step = 16 * (dim + 16) + 2 * dim if is_copied and kind == KINDS["q8_0"] else 32 * pitch
    steps = 1 if not is_copied else 4 if dim <= 128 else 2
    ends, weights = 64 * STRANDS + 32 * STRANDS * pitch, 4 * STRANDS * (MOST_PIECES + 1)
    return max(STRANDS * steps * step, ends, weights) + 2 * rows * pitch + 16 * rows + 32


def prefill_shared(dim: int, kind: int, arch: int) -> int:
    """Bytes of struct Shared in attention_prefill.cu."""
    tile, pitch, rows = _tile(dim), dim + 8, prefill_block(dim, kind, arch)[1]
    halves = 4 * tile * pitch if _is_async(kind, arch) else tile * pitch + 8
    return 2 * (rows * pitch + halves) + 16 * rows


def prefill_shape(cache: CudaKv, arch: int) -> tuple[int, int]:
    """(width, KIND) of the prompt kernel that fits the card."""
    dim, kind = cache.shape
    if arch in LITTLE_SHARED and prefill_shared(dim, kind, arch) > LITTLE_SHARED[arch]:
        return 128 if dim <= 128 else LARGEST_DIM, ANY
    return dim, kind


def prefill_block(dim: int, kind: int, arch: int) -> tuple[int, int]:
    """Threads and rows of a block of attention_prefill."""
    if arch < 80:
        return 128, 64
    return (128 if _is_async(kind, arch) and dim <= 128 else 256), 128


def _decode(ops: Launcher, call: _Call, first: int, last: int, plan: DeviceArray | None) -> None:
    """Tokens first to last, or that many items of a plan."""
    dim, kind = call.cache.shape
    tiles = _tiles_for(call, dim, kind)
    chunk = _chunk(call.members, tiles)
    parts = _groups(chunk * call.members, 16 * tiles)
    most = most_pieces(call.cache.kv_heads)
    stride = _stride(call.cache.kv_heads, call.limit, call.window)
    pieces = stride + (1 if call.window else 0)  # tokens of an item begin at different ones
    each = 1 if plan is None else chunk  # rows for each token or item
    row_bytes = call.num_heads * stride * (call.cache.value_dim + 2) * 4
    batch = max(1, PARTIAL_BYTES // row_bytes // each)
    batch = min(batch, last - first, max(1, TICKETS // (call.cache.kv_heads * parts)))
    partial = ops.scratch((batch * each * call.num_heads * stride, call.cache.value_dim))
    stats = ops.scratch((batch * each * call.num_heads * stride, 2))
    pointers = call.q, call.cache.keys, call.cache.values, call.table, call.batch.slots
    shared = decode_shared(dim, kind, tiles, ops.arch)
    plan_ptr = 0 if plan is None else plan.ptr
    for start in range(first, last, batch):
        stop = min(last, start + batch)
        numbers = start, stop, parts, *call.cache_numbers, call.width, call.cache.pages
        ends = call.window, most, stride, chunk
        ops.kernel(DECODE[dim, kind, tiles])(
            ((stop - start) * pieces, call.cache.kv_heads * parts),
            32 * STRANDS,
            (
                *(array.ptr for array in pointers),
                *(call.batch.positions.ptr, call.heads.ptr, plan_ptr, partial.ptr, stats.ptr),
                *(call.cache.tickets.ptr, call.out.ptr),
                *map(np.int32, numbers),
                *call.factors,
                *map(np.int32, (*ends, pieces)),
            ),
            shared,
        )


def _mixed(ops: Launcher, call: _Call) -> None:
    """Short runs to attention_decode, the others to attention_prefill, as the device finds them."""
    chunk = _chunk(call.members, _tiles_for(call, *call.cache.shape))
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
    numbers = tokens, *limits, most_pieces(call.cache.kv_heads), items, tiles
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
            *(call.heads.ptr, plan.ptr, tile_list.ptr, call.out.ptr),
            *map(np.int32, (*call.cache_numbers, call.width, call.cache.pages)),
            *call.factors,
            np.int32(call.window),
        ),
        prefill_shared(dim, kind, ops.arch),
    )


def _tiles_for(call: _Call, dim: int, kind: int) -> int:
    """The least row tiles that hold all tokens that a slot may have here, or the most there are."""
    choices = row_tiles(dim, kind)
    rows = min(call.tokens, SHORT_RUN) * call.members
    return next((tiles for tiles in choices if 16 * tiles >= rows), choices[-1])


def _chunk(members: int, tiles: int) -> int:
    """Tokens that one block of attention_decode takes."""
    return max(1, min(SHORT_RUN, 16 * tiles // members))


def _stride(kv_heads: int, context: int, window: int) -> int:
    """Most pieces of one token."""
    seen = min(context, window) if window else context
    return min(most_pieces(kv_heads), _groups(seen, PIECE)) + (1 if window else 0)


def _tile(dim: int) -> int:
    return 32 if dim > 128 else 64


def _is_async(kind: int, arch: int) -> bool:
    return arch >= 80 and kind == KINDS["f16"]


def _kv_bytes(kv_type: str, dim: int) -> int:
    """Bytes of one head at one position."""
    if kv_type not in KV_TYPES:
        raise ValueError(f"cache type {kv_type!r}; the cuda backend has {', '.join(KV_TYPES)}")
    length, nbytes = KV_TYPES[kv_type]
    if dim % max(length, 8):
        raise ValueError(
            f"cache type {kv_type}: heads of {dim} are no multiple of {max(length, 8)}"
        )
    if dim > LARGEST_DIM:
        raise ValueError(f"heads of {dim}; the cuda backend has up to {LARGEST_DIM}")
    return dim // length * nbytes


def _groups(items: int, size: int) -> int:
    return -(-items // size)
