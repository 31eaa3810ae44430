"""Attention to shared-out positions: its own sources, run on the CPU, give together what one rank's
attention gives; what a rank keeps and how parts are joined, against the reference."""

from __future__ import annotations

import ctypes
import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from voltapile.kernels.backend import describe
from voltapile.kernels.cuda import attention, pages
from voltapile.kernels.cuda.launch import DeviceArray
from voltapile.kernels.cuda.links import Islands, Links
from voltapile.kernels.cuda.positions import SEEN, STORED, CudaPositions
from voltapile.kernels.ops import Batch
from voltapile.kernels.positions import Runs
from voltapile.kernels.reference.families import ReferenceFamilyOps
from voltapile.shm.gguf import Gguf
from voltapile.topology import machine
from voltapile.topology.architectures import spec_of
from voltapile.topology.gpu import Gpu
from voltapile.topology.plan import Backend, Options
from voltapile.topology.planner import plan
from voltapile.workers.engine import Engine
from voltapile.workers.protocol import Row

from .attention_twin import PAGE, Case
from .emulation import EmulatedOps, has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no g++")
PARTS = 3
SHARED = {70: 96 << 10, 75: 64 << 10, 80: 160 << 10, 90: 227 << 10}
REF = ReferenceFamilyOps()


class Emulated(CudaPositions, EmulatedOps):
    def upload(self, target: DeviceArray, values: np.ndarray) -> None:
        raw = np.ascontiguousarray(values)
        ctypes.memmove(target.ptr, raw.ctypes.data, raw.nbytes)


@pytest.fixture(scope="module")
def ops_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Emulated]:
    folder: Path = tmp_path_factory.mktemp("emulated")
    return lambda arch: Emulated(arch, folder, SHARED[arch])


class Split:
    """The positions of a case, kept by one rank and by PARTS. All caches begin as NaNs."""

    def __init__(self, ops: Emulated, case: Case) -> None:
        self.ops, self.case = ops, case
        self.rng = np.random.default_rng(case.seed)
        length = {slot: start + count for slot, start, count in case.runs}
        slots = max(length) + 1
        self.width = -(-max(length.values()) // (PARTS * PAGE)) + 1
        # Page 0 takes what is kept elsewhere: the table of the padding slot, which is the last.
        table = 1 + self.rng.permutation(slots * self.width).reshape(slots, self.width)
        self.tables = np.concatenate([table, np.zeros((1, self.width))]).astype(np.int32)
        self.caches = [self._cache() for _ in range(PARTS)]
        everything = [(slot, p) for slot, n in sorted(length.items()) for p in range(n)]
        self.tokens = [(slot, start + i) for slot, start, n in case.runs for i in range(n)]
        self.k, self.v = (
            self.rng.standard_normal((len(everything), case.kv_heads, case.dim), np.float32)
            for _ in range(2)
        )
        self.places = everything
        self.q = self.rng.standard_normal((len(self.tokens), case.heads, case.dim), np.float32)
        for part, cache in enumerate(self.caches):
            kept = ops.kept(self.batch(everything), Runs(part, PARTS, PAGE))
            pages.store_kv(ops, cache, ops.array(self.k), ops.array(self.v), kept.stored, 0)

    def _cache(self) -> Any:
        case = self.case
        made = pages.kv_cache(
            self.ops, self.tables.size, case.kv_heads, PAGE, case.dim, case.dim, *case.types
        )
        for part in pages.page_parts(made):
            self.ops.upload(part, np.full(part.shape, 0xFF, np.uint8))
        return made

    def batch(self, tokens: list[tuple[int, int]], outputs: int | None = None) -> Batch:
        slots, positions = (self.ops.array(c) for c in np.array(tokens, np.int32).T.copy())
        nothing = self.ops.array(np.zeros(len(tokens), np.int32))
        ends = self.ops.array(np.zeros(len(self.case.runs) if outputs is None else outputs, "i4"))
        tables = (self.ops.array(self.tables),)
        return Batch(nothing, slots, positions, positions, nothing, ends, tables)

    def run(self, first: int = 0, last: int | None = None, outputs: int | None = None) -> Any:
        """What the parts give together [tokens, H, dim], and their weights [PARTS, tokens, H]."""
        ops, case = self.ops, self.case
        tokens = self.tokens[first:last]
        batch, q = self.batch(tokens, outputs), ops.array(self.q[first:last])
        found = []
        for part, cache in enumerate(self.caches):
            seen = ops.kept(batch, Runs(part, PARTS, PAGE)).seen
            found.append(
                ops.attention_part(q, cache, seen, 0, case.head_map, case.scale, case.softcap)
            )
        weights = np.stack([ops.to_host(each) for _, each in found])
        for out, own in zip(found, weights, strict=True):
            hidden = np.isneginf(own)
            values = ops.to_host(out[0]).reshape(*own.shape, case.dim)
            assert np.isfinite(values).all()
            assert not values[hidden].any()
        everyone = ops.array(np.concatenate(list(weights), axis=1))
        joined = [ops.to_host(ops.weigh_(o, own, everyone)) for o, own in found]
        return sum(joined).reshape(len(tokens), case.heads, case.dim), weights

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """[tokens, H, dim] and log(sum(exp)) of each part's positions, in float64 of halves."""
        case = self.case
        k, v = (each.astype(np.float16).astype(np.float64) for each in (self.k, self.v))
        slots, positions = np.array(self.places).T
        out = np.zeros((len(self.tokens), case.heads, case.dim))
        weights = np.full((PARTS, len(self.tokens), case.heads), -np.inf)
        for t, (slot, position) in enumerate(self.tokens):
            seen = np.flatnonzero((slots == slot) & (positions <= position))
            part = positions[seen] // PAGE % PARTS
            for h, kv in enumerate(case.head_map):
                scores = k[seen, kv] @ self.q[t, h].astype(np.float64) * case.scale
                if case.softcap:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                p = np.exp(scores - scores.max())
                out[t, h] = p @ v[seen, kv] / p.sum()
                for each in set(part):
                    weights[each, t, h] = np.logaddexp.reduce(scores[part == each])
        return out, weights


CASES = {
    "generated": Case([(0, 190, 4), (1, 5, 1), (2, 700, 1)]),
    "prompt": Case([(0, 0, 33), (2, 70, 1), (1, 120, 80)], heads=3, kv_heads=1),
    "capped": Case([(1, 63, 3), (0, 64, 12)], heads=5, kv_heads=3, head_map=[1, 0, 2, 2, 1],
                   softcap=5.0),
}  # fmt: skip
SLOW = [("generated", 70), ("generated", 75), ("prompt", 75), ("prompt", 80), ("capped", 70),
        ("capped", 80)]  # fmt: skip
RUNS = [
    *[("generated", 80), ("prompt", 70)],
    *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
]


@pytest.mark.parametrize(("name", "arch"), RUNS)
def test_the_parts_give_the_whole(ops_for: Callable[[int], Emulated], name: str, arch: int) -> None:
    world = Split(ops_for(arch), CASES[name])
    joined, weights = world.run()
    out, logs = world.expected()
    np.testing.assert_array_equal(np.isneginf(weights), np.isneginf(logs))
    assert np.isneginf(logs).any()
    # Halves round queries and probabilities: see attention_twin.World.expected.
    np.testing.assert_allclose(joined, out, atol=8e-3)
    there = np.isfinite(logs)
    np.testing.assert_allclose(weights[there], logs[there], atol=8e-3)


@pytest.mark.parametrize("arch", [pytest.param(70, marks=pytest.mark.slow), 80])
def test_bits_do_not_depend_on_company(ops_for: Callable[[int], Emulated], arch: int) -> None:
    world = Split(ops_for(arch), CASES["generated"])
    together, weights = world.run()
    for i in (0, 3, 5):
        alone, own = world.run(i, i + 1, 1)
        np.testing.assert_array_equal(alone[0], together[i])
        np.testing.assert_array_equal(own[:, 0], weights[:, i])


@pytest.mark.slow
def test_blocks_of_sm_90(
    ops_for: Callable[[int], Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block takes a piece alone there: the CPU has no clusters."""
    monkeypatch.setattr(attention, "_blocks", lambda *_: 1)
    world = Split(ops_for(90), CASES["generated"])
    joined, weights = world.run()
    out, logs = world.expected()
    np.testing.assert_allclose(joined, out, atol=8e-3)
    np.testing.assert_allclose(np.exp(weights), np.exp(logs), rtol=8e-3)


@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_kept(ops_for: Callable[[int], Emulated], part: int) -> None:
    ops, count = ops_for(70), 500
    tables = (ops.array(np.zeros((5, 2), np.int32)),)
    slots, positions = np.arange(count, dtype=np.int32) % 4, np.arange(count, dtype=np.int32)
    own = Batch(*(positions,) * 6, pages=(np.zeros((5, 2), np.int32),))
    theirs = REF.kept(replace(own, slots=slots), Runs(part, PARTS, 16))
    arrays = [ops.array(each) for each in (positions, slots, positions)]
    batch = Batch(*arrays, arrays[0], arrays[0], arrays[0], pages=tables)
    ours = ops.kept(batch, Runs(part, PARTS, 16))
    for name in ("slots", "positions"):
        for each in ("seen", "stored"):
            found = ops.to_host(getattr(getattr(ours, each), name))
            np.testing.assert_array_equal(found, getattr(getattr(theirs, each), name), (each, name))


def test_attention_may_read_early_where_tokens_stand() -> None:
    """It does, before its predecessor has ended, and it may be the next launch after these two."""
    assert not SEEN.waits
    assert not STORED.waits


def test_weighing_and_taking(ops_for: Callable[[int], Emulated]) -> None:
    ops, rng = ops_for(70), np.random.default_rng(1)
    o = rng.standard_normal((3, 5 * 40)).astype(np.float32)
    weights = 30 * rng.standard_normal((4, 3, 5)).astype(np.float32)
    weights[0, 1], weights[2, :, 3] = -np.inf, -np.inf
    o[1, :40] = np.nan  # of a token that sees nothing there
    everyone = np.concatenate(list(weights), axis=1)
    ours = ops.to_host(ops.weigh_(ops.array(o), ops.array(weights[0]), ops.array(everyone)))
    assert not ours[1].any()
    theirs = REF.weigh_(np.nan_to_num(o), weights[0], everyone)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-30)
    x = ops.array(o)
    np.testing.assert_array_equal(ops.to_host(ops.take(x, 70, 130)), o[:, 130:])
    with pytest.raises(AssertionError):
        ops.take(x, 71, 130)


@pytest.fixture
def gpu(fake_cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = fake_cupy.Gpu()
    fake_cupy.install(monkeypatch, made)
    loader = importlib.import_module("voltapile.kernels.cuda.loader")
    monkeypatch.setattr(loader, "compile_all", lambda instances, *_: [b""] * len(instances))
    monkeypatch.setattr(loader, "compile_instance", lambda *_: b"")
    return made


@pytest.mark.parametrize("model", ["qwen3", "qwen35"])
def test_what_a_model_launches(gpu: Any, mini: Path, model: str) -> None:
    """One rank of three on a GPU that is not there: a prompt and a token, in planned memory."""
    from voltapile.kernels.cuda.family_ops import CudaFamilyOps

    cards = [
        Gpu(index=i, name="A card", arch=70, memory_bytes=64 << 30, free_bytes=60 << 30)
        for i in range(PARTS)
    ]
    computer = msgspec.structs.replace(machine.probe(), gpus=cards)
    options = Options(
        context=512, slots=3, split_mode="tensor", ranks=3, kv_split="positions",
        overrides=["embed=vram"],
    )  # fmt: skip
    with Gguf.open(mini / model / "model-f16.gguf") as gguf:
        spec = spec_of(gguf)
        made = plan(spec, gguf, computer, Backend(**describe("cuda")), options)
        planned = made.ranks[1].memory["scratch"]
        ops = CudaFamilyOps(0, planned)
        ops._links = Links(0, 1, PARTS, Islands(((0, 1, 2),)), np.zeros(2, np.uint32))
        engine = Engine(made, ops, gguf, 1)
        engine.load()
        prompt = Row(slot=0, tokens=np.zeros(300, np.int32), pages=[[1, 2]], sample=True)
        for batch in (engine.buffer.fill([prompt]), engine.buffer.fill([], 1)):
            gpu.launches.clear()
            ops.reset_scratch()
            engine._forward(batch)
            each = sum(kind.kind == "full" for kind in spec.caches) or 1
            counted = Counter(gpu.launches)
            assert counted["keep_seen"] == counted["keep_stored"] == 1
            assert (
                counted["weigh"] == counted["take_columns"] == counted["attention_decode"] >= each
            )
        assert ops.scratch_peak <= planned
