"""Whole models whose ranks share out positions, with the CUDA kernels for that run on the CPU and
everything else the reference's: the tokens of one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda.launch import DeviceArray, Instance, Kernel
from voltapile.kernels.cuda.pages import TICKETS, CudaKv
from voltapile.kernels.cuda.positions import CudaPositions
from voltapile.kernels.ops import Batch
from voltapile.kernels.positions import Kept, Runs
from voltapile.kernels.reference.families import ReferenceFamilyOps
from voltapile.workers import engine as engine_module

from ..kernels.cuda.attention_twin import halves
from ..kernels.cuda.emulated_families import EmulatedFamilies
from ..kernels.cuda.emulation import has_compiler
from .test_family_ranks import compare

pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="there is no g++"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
Make = Callable[..., Any]
ONE_AT_A_TIME = threading.Lock()  # ranks are threads, and the emulation has one GPU


class Kernels(CudaPositions, EmulatedFamilies):
    def kernel(self, instance: Instance) -> Kernel:
        with ONE_AT_A_TIME:
            made = super().kernel(instance)

        def call(*args: Any, **named: Any) -> None:
            with ONE_AT_A_TIME:
                made(*args, **named)

        return call


class Mixed(ReferenceFamilyOps):
    """The reference, but for what CudaPositions has."""

    def __init__(self, arch: int, folder: Path) -> None:
        super().__init__()
        self.kernels = Kernels(arch, folder, {70: 96 << 10, 80: 160 << 10}[arch])
        self.kept_arrays: list[DeviceArray] = []  # a view does not own its memory

    def kept(self, batch: Batch, runs: Runs) -> Kept:
        made = self.kernels.kept(self._own(batch), runs)
        seen = replace(batch, positions=self._back(made.seen.positions))
        positions, slots = map(self._back, (made.stored.positions, made.stored.slots))
        return Kept(seen, replace(batch, positions=positions, slots=slots))

    def attention_part(
        self, q: Any, cache: Any, seen: Batch, group: int, head_map: Sequence[int], scale: float,
        softcap: float = 0.0,
    ) -> tuple[Any, Any]:  # fmt: skip
        own = self._array(q), self._halves(cache), self._own(seen)
        made = self.kernels.attention_part(*own, group, head_map, scale, softcap)
        return self._back(made[0]), self._back(made[1])

    def weigh_(self, o: Any, weights: Any, all_weights: Any) -> Any:
        return self._back(self.kernels.weigh_(*map(self._array, (o, weights, all_weights))))

    def take(self, x: Any, width: int, offset: int) -> Any:
        return self._back(self.kernels.take(self._array(x), width, offset))

    def _array(self, x: np.ndarray) -> DeviceArray:
        made = self.kernels.array(np.ascontiguousarray(x))
        self.kept_arrays.append(made)
        return made

    def _own(self, batch: Batch) -> Batch:
        arrays = {name: self._array(getattr(batch, name)) for name in ("slots", "positions")}
        return replace(batch, pages=tuple(map(self._array, batch.pages)), **arrays)

    def _halves(self, kv: Any) -> CudaKv:
        """A reference's cache as the kernels' f16."""
        arch = self.kernels.arch
        parts = [self._array(halves(each, arch)) for each in (kv.keys, kv.values)]
        pages, _, heads, dim = kv.keys.shape
        tickets = self._array(np.zeros(TICKETS, np.uint32))
        return CudaKv(*parts, tickets, pages, heads, dim, kv.values.shape[3], "f16", "f16")

    def _back(self, x: DeviceArray) -> np.ndarray:
        self.kept_arrays.append(x)
        return self.kernels.view(x)


@pytest.mark.parametrize(
    ("model", "ranks", "arch"), [("qwen3", 3, 80), ("llama", 6, 70), ("qwen35", 2, 70)]
)
def test_tokens(
    mini: Path, engine_for: Make, ranks_for: Make, drive: Make, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, model: str, ranks: int, arch: int,
) -> None:  # fmt: skip
    usual, made = engine_module._load_ops, []

    def load(plan: Any, rank: int, board: Any) -> Any:
        if len(plan.ranks) == 1:
            return usual(plan, rank, board)
        made.append(Mixed(arch, tmp_path))
        return made[-1]

    monkeypatch.setattr(engine_module, "_load_ops", load)
    options = {"ranks": ranks, "split_mode": "tensor", "kv_split": "positions"}
    compare(engine_for, ranks_for, drive, mini / model / "model-f16.gguf", "reference", **options)
    assert len(made) == ranks
    launched = {each.function for ops in made for each, _, _ in ops.kernels.launched}
    assert launched >= {
        *("keep_seen", "keep_stored", "weigh", "take_columns"),
        *("attention_decode", "attention_prefill"),
    }
