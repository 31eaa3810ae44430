"""Models of real sizes on a GPU that is not there: what launchers take of scratch memory on the way
is no more than the Plan has reckoned. Of tests/workers/test_engine.py's models everything is small,
and what a Plan has for library and scores would hide whatever is forgotten."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec
import numpy as np
import pytest
from voltapile.kernels.backend import describe
from voltapile.kernels.cuda.links import Islands, Links
from voltapile.shm.gguf import Gguf
from voltapile.topology.architectures import spec_of
from voltapile.topology.gpu import Gpu
from voltapile.topology.plan import Backend, Options
from voltapile.topology.planner import plan
from voltapile.workers.engine import Engine
from voltapile.workers.protocol import Row

from ...topology.reference import computer, header

MODELS = ["qwen3-8b-q4km", "qwen3-30b-a3b-q4km", "qwen35-27b-q8", "flash-next-q4"]
TOKENS = 3000
SPREADS = [(1, ""), (2, "heads"), (6, "positions")]


@pytest.fixture
def gpu(fake_cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = fake_cupy.Gpu(1 << 42)
    fake_cupy.install(monkeypatch, made)
    loader = importlib.import_module("voltapile.kernels.cuda.loader")
    monkeypatch.setattr(loader, "compile_all", lambda instances, *_: [b""] * len(instances))
    monkeypatch.setattr(loader, "compile_instance", lambda *_: b"")
    monkeypatch.setattr(Gguf, "data", lambda self, name: np.zeros(self.tensors[name].nbytes, "u1"))
    monkeypatch.setattr(Gguf, "forget", lambda self, name: None)
    return made


def engine_of(model: str, ranks: int, split: str, slots: int) -> Engine:
    from voltapile.kernels.cuda.family_ops import CudaFamilyOps

    cards = [
        Gpu(index=i, name="A card", arch=70, memory_bytes=200 << 30, free_bytes=190 << 30)
        for i in range(ranks)
    ]
    gguf, here = header(model), msgspec.structs.replace(computer("x86-2xh200"), gpus=cards)
    options = Options(
        context=4096, slots=slots, batch_tokens=TOKENS, checkpoints=0, ranks=ranks, kv_split=split,
        split_mode="tensor" if ranks > 1 else "", overrides=["embed=vram", "ngram=vram"],
    )  # fmt: skip
    made = plan(spec_of(gguf), gguf, here, Backend(**describe("cuda")), options)
    ops = CudaFamilyOps(0, made.ranks[0].memory["scratch"], choices=made.choices)
    if ranks > 1:
        ops._links = Links(0, 0, ranks, Islands((tuple(range(ranks)),)), np.zeros(2, np.uint32))
    ops.pinned = lambda nbytes: np.empty(nbytes, np.uint8)
    engine = Engine(msgspec.structs.replace(made, buckets=[1, slots]), ops, gguf, 0, True)
    engine.load()
    return engine


@pytest.mark.parametrize(
    ("model", "ranks", "split"),
    # A flash-next's caches are not shared out by position.
    [(model, *each) for model in MODELS for each in SPREADS if (model, each[0]) != (MODELS[-1], 6)],
)
def test_scratch_is_enough(gpu: Any, model: str, ranks: int, split: str) -> None:
    # Logits of many slots would hide the rest; a prompt of as many tokens has them all at once.
    slots = 80 if model == MODELS[0] else 4
    engine = engine_of(model, ranks, split, slots)
    long = np.zeros(TOKENS - 7, np.int32)
    for rows in (
        [Row(slot=0, tokens=long, sample=True)],
        [Row(slot=i, tokens=np.zeros(37, np.int32), sample=True) for i in range(slots)],
        [*(Row(slot=i, sample=True) for i in range(3)), Row(slot=3, tokens=long, sample=True)],
        [Row(slot=i, sample=True) for i in range(slots)],
    ):
        engine.ops.reset_scratch()
        engine._forward(engine.buffer.fill(rows))
    for count in (slots, TOKENS):  # a MemoryError if it is not
        assert sum(map(len, engine.prompts.logits(0, np.zeros(count, np.int32), 0))) == count
    assert engine.ops.scratch_peak > engine.plan.ranks[0].memory["scratch"] / 6
