"""Attention in float64 numpy over what lies in a cache's pages, and worlds to compare it in.

Used by test_attention_maps.py (the sources on the CPU) and tests/gpu/test_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from voltapile.kernels.cuda import attention as launcher
from voltapile.kernels.cuda import heads, pages, rows, split
from voltapile.kernels.cuda.launch import DeviceArray
from voltapile.kernels.ops import Batch

PAGE = 64
HALF = 2.0**-11  # relative rounding of halves
Put = Callable[[np.ndarray], DeviceArray]


@dataclass
class Case:
    """runs: (slot, first position, tokens); what lies before the first position is stored too."""

    runs: list[tuple[int, int, int]]
    dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    value_dim: int = 0
    types: tuple[str, str] = ("f16", "f16")
    head_map: list[int] = field(default_factory=list)
    window: int = 0
    softcap: float = 0.0
    seed: int = 0
    sharpness: float = 2.0  # deviation of the scores
    outputs: int = -1  # sampled rows; -1: the last of each run

    def __post_init__(self) -> None:
        self.value_dim = self.value_dim or self.dim
        if not self.head_map:
            self.head_map = [h * self.kv_heads // self.heads for h in range(self.heads)]

    @property
    def scale(self) -> float:
        return self.sharpness / self.dim**0.5


class World:
    """A cache with the positions of a case in it, and its step's tokens."""

    def __init__(self, ops: Any, put: Put, case: Case) -> None:
        self.ops, self.put, self.case = ops, put, case
        rng = np.random.default_rng(case.seed)
        slots = max(slot for slot, _, _ in case.runs) + 1
        length = {slot: start + count for slot, start, count in case.runs}
        self.width = -(-max(length.values()) // PAGE) + 1
        count = slots * self.width + 1
        self.table = (1 + rng.permutation(slots * self.width)).astype(np.int32)
        self.table = self.table.reshape(slots, self.width)
        self.cache = pages.kv_cache(
            ops, count, case.kv_heads, PAGE, case.dim, case.value_dim, *case.types
        )
        for part in pages.page_parts(self.cache):  # whatever others left there: NaNs
            ops.upload(part, np.full(part.shape, 0xFF, np.uint8))
        self.device_table = put(self.table)
        everything = [(slot, p) for slot, n in sorted(length.items()) for p in range(n)]
        shape = len(everything), case.kv_heads
        self.k = rng.standard_normal((*shape, case.dim), np.float32)
        self.v = rng.standard_normal((*shape, case.value_dim), np.float32)
        self.places = everything
        self.store(self.k, self.v, everything)
        tokens = [(slot, start + i) for slot, start, n in case.runs for i in range(n)]
        self.tokens = tokens
        self.q = rng.standard_normal((len(tokens), case.heads, case.dim), np.float32)

    def batch(self, tokens: list[tuple[int, int]], outputs: int) -> Batch:
        pairs = np.array(tokens, np.int32).reshape(-1, 2)
        slots, positions = self.put(pairs[:, 0].copy()), self.put(pairs[:, 1].copy())
        nothing = self.put(np.zeros(len(tokens), np.int32))
        return Batch(
            tokens=nothing,
            slots=slots,
            positions=positions,
            rope_positions=positions,
            continues=nothing,
            outputs=self.put(np.zeros(outputs, np.int32)),
            pages=(self.device_table,),
        )

    def store(self, k: np.ndarray, v: np.ndarray, tokens: list[tuple[int, int]]) -> None:
        batch = self.batch(tokens, 1)
        pages.store_kv(self.ops, self.cache, self.put(k), self.put(v), batch, 0)

    def run(
        self, first: int = 0, last: int | None = None, outputs: int | None = None
    ) -> np.ndarray:
        """[tokens, H, value_dim] for some of the step's tokens."""
        last = len(self.tokens) if last is None else last
        case = self.case
        if outputs is None:
            outputs = case.outputs if case.outputs >= 0 else len(case.runs)
        y = launcher.attention(
            self.ops,
            self.put(self.q[first:last]),
            self.cache,
            self.batch(self.tokens[first:last], outputs),
            0,
            case.head_map,
            case.scale,
            case.window,
            case.softcap,
        )
        return self.ops.to_host(y).reshape(last - first, case.heads, case.value_dim)

    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 keys and values [pages, KV heads, 64, dim]."""
        return tuple(  # type: ignore[return-value]
            decode(self.ops.to_host(part), kind, self.case.kv_heads, dim, self.ops.arch)
            for part, kind, dim in zip(
                pages.page_parts(self.cache),
                self.case.types,
                (self.case.dim, self.case.value_dim),
                strict=True,
            )
        )

    def expected(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The twin's [H, value_dim] of a token of the step, and how far off a kernel may be.

        Halves round q (and dequantised k): independent errors of the products in a score, four
        deviations; probabilities and dequantised v round by HALF each.
        """
        keys, values = self.stored_once()
        slot, position = self.tokens[index]
        case = self.case
        first = max(0, position + 1 - case.window) if case.window else 0
        seen = np.arange(first, position + 1)
        ids = self.table[slot, seen // PAGE]
        out = np.zeros((case.heads, case.value_dim))
        allowed = np.zeros_like(out)
        for h, kv in enumerate(case.head_map):
            k, v = keys[ids, kv, seen % PAGE], values[ids, kv, seen % PAGE]
            products = k * self.q[index, h].astype(np.float64) * case.scale
            scores = products.sum(-1)
            error = 4 * HALF * np.sqrt(2 * (products**2).sum(-1)).max() + 1e-5
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            p = np.exp(scores - scores.max())
            p /= p.sum()
            out[h] = p @ v
            allowed[h] = (2 * error + 2 * HALF) * (p @ np.abs(v)) + 1e-6
        return out, allowed

    def stored_once(self) -> tuple[np.ndarray, np.ndarray]:
        if not hasattr(self, "_stored"):
            self._stored = self.stored()
        return self._stored

    def check(self, y: np.ndarray, first: int = 0, every: int = 1) -> None:
        for i in range(0, len(y), every):
            out, allowed = self.expected(first + i)
            worst = (np.abs(y[i] - out) / allowed).max()
            assert worst <= 1, f"token {self.tokens[first + i]}: {worst:.3g} times what may be"


def turned(rows: np.ndarray, arch: int) -> np.ndarray:
    """[.., 64, bytes] as a page has them, from the other order; and back (attention_kv.cuh)."""
    wide = rows.shape[-1] // 16
    group = min(8, wide & -wide)
    turns = np.arange(PAGE) * group // 8 & (group - 1) if arch >= 80 else np.zeros(PAGE, np.int64)
    order = np.arange(wide) ^ turns[:, None]
    pieces = rows.reshape(*rows.shape[:-1], wide, 16)
    return np.take_along_axis(pieces, np.broadcast_to(order[..., None], pieces.shape), -2).reshape(
        rows.shape
    )


def halves(part: np.ndarray, arch: int) -> np.ndarray:
    """uint8: a reference's keys or values, [pages, 64, heads, dim], as pages of f16 have them."""
    rows = np.ascontiguousarray(part.transpose(0, 2, 1, 3)).astype(np.float16)
    return turned(rows.view(np.uint8), arch)


def signs(arch: int) -> int:
    """What stored bytes of q8_0 are to be changed by."""
    return 128 if arch >= 80 else 0


def decode(raw: np.ndarray, kind: str, kv_heads: int, dim: int, arch: int) -> np.ndarray:
    """float64 [pages, KV heads, 64, dim] of a cache's bytes; NaN where nothing was stored."""
    heads = raw.reshape(len(raw), kv_heads, -1)
    shape = *heads.shape[:2], PAGE
    bits = {"f16": 16, "q8_0": 8, "q4_0": 4}[kind]
    data = turned(heads[..., : PAGE * dim * bits // 8].reshape(*shape, -1), arch)
    if kind == "f16":
        return data.view(np.float16).astype(np.float64)
    scales = heads[..., PAGE * dim * bits // 8 :].copy().view(np.float16).astype(np.float64)
    if kind == "q8_0":
        data = (data ^ signs(arch)).view(np.int8)
        numbers = data.reshape(*shape, dim // 16, 16).astype(np.float64)
    else:
        pairs = data.reshape(*shape, dim // 32, 16)
        numbers = np.concatenate([pairs & 15, pairs >> 4], -1).astype(np.float64) - 8
    return (numbers * scales.reshape(*shape, -1, 1)).reshape(*shape, dim)


def check_rope_store(
    ops: Any,
    put: Put,
    weights: tuple[Any, Any],
    layout: str,
    pairs: int,
    types: tuple[str, str],
    dim: int = 64,
    tolerance: float = 0.0,
) -> None:
    """heads.rope_store against the launchers that it stands for; weights: norms of q and k. Queries
    that lie beside gates are taken from there."""
    case = Case([(0, 62, 3), (1, 5, 1)], dim=dim, heads=6, kv_heads=2, types=types)
    worlds = [World(ops, put, case) for _ in range(2)]
    rng = np.random.default_rng(1)
    q = rng.standard_normal((4, 6 * dim), np.float32)
    k, v = (rng.standard_normal((4, 2 * dim), np.float32) for _ in range(2))
    turns = rng.standard_normal((4, pairs, 2), np.float32)
    angles, batch = put(turns), worlds[0].batch(worlds[0].tokens, 4)
    once = heads.rope_store(
        *(ops, put(q), put(k), put(v), angles, layout, worlds[0].cache, batch, 0, 1e-6, weights)
    )
    both = np.stack([q, -q]).reshape(2, 4, 6, dim).transpose(1, 2, 0, 3).reshape(4, -1)
    late, gates = split.split_heads(ops, put(both), dim)
    apart = heads.rope_store(
        *(ops, late, put(k), put(v), angles, layout, worlds[0].cache, batch, 0, 1e-6, weights)
    )
    np.testing.assert_array_equal(ops.to_host(apart), ops.to_host(once).reshape(4, -1))
    np.testing.assert_array_equal(ops.to_host(gates), -q)
    parts = [put(q), put(k)]
    for i, weight in enumerate(weights):
        if weight is not None:
            parts[i] = rows.rms_norm(ops, parts[i], weight, 1e-6)
        rows.rope_(ops, parts[i], angles, dim, layout)
    pages.store_kv(ops, worlds[1].cache, parts[1], put(v), batch, 0)
    np.testing.assert_allclose(
        ops.to_host(once), ops.to_host(parts[0]), rtol=tolerance, atol=tolerance
    )
    for ours, theirs in zip(worlds[0].stored(), worlds[1].stored(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1000 * tolerance)
