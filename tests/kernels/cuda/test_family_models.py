"""Whole models whose experts, delta nets, streams and sparse attention are the CUDA kernels, run on
the CPU, and everything else the reference's: against the reference alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.families import CudaFamilies
from voltapile.kernels.cuda.launch import DeviceArray
from voltapile.kernels.cuda.pages import CudaKv
from voltapile.kernels.families import DeltaWeights, MixWeights, NGramWeights, SharedExpert
from voltapile.kernels.ops import Batch
from voltapile.kernels.reference.families import ReferenceFamilyOps
from voltapile.shm.gguf import Gguf
from voltapile.workers.engine import Engine
from voltapile.workers.protocol import Row

from .attention_twin import halves
from .emulated_families import EmulatedFamilies
from .emulation import has_compiler

pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="there is no g++"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
MODELS = [
    ("qwen3moe", "f16", "p8"),
    ("qwen3moe-k", "Q4_K_M", "p8"),
    ("qwen35", "Q8_0", "p61"),
    ("qwen35-k", "Q4_K_M", "p61"),
    ("qwen35moe", "Q8_0", "p8"),
    ("qwen3next", "Q8_0", "p8"),
    ("qwen4exp", "f16", "p8"),
    ("qwen4exp-k", "Q4_K_M", "p8"),
]
# Of the largest logit. Activations that meet quantised experts are halves, and so are keys and
# values where blocks are chosen; experts that are not quantised lose nothing.
TOLERANCE, EXACT = 2e-3, 1e-4


class Mixed(ReferenceFamilyOps):
    """The reference, but for what CudaFamilies has. Weights and arrays are known to both."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.kernels = EmulatedFamilies(80, folder, max_shared(80))
        self.twins: dict[int, Any] = {}
        self.kept: list[DeviceArray] = []  # a view does not own its memory
        self.calls: set[str] = set()

    def weight(self, data: np.ndarray, type_name: str, shape: tuple[int, ...]) -> Any:
        found = super().weight(data, type_name, shape)
        raw = np.ascontiguousarray(data)
        if len(shape) == 1 and type_name != "F32":
            raw, type_name = self.dense(found).reshape(-1).view(np.uint8), "F32"
        self.twins[id(found)] = self.kernels.weight(raw, type_name, shape), found
        return found

    def file_weight(self, path: str, offset: int, type_name: str, shape: tuple[int, ...]) -> Any:
        found = SimpleNamespace(shape=shape, nbytes=0)
        self.twins[id(found)] = self.kernels.file_weight(path, offset, type_name, shape), found
        return found

    def own(self, x: Any) -> Any:
        """What the kernels take for it."""
        if isinstance(x, np.ndarray) and x.dtype != object:
            array = np.ascontiguousarray(x)
            return DeviceArray(array.ctypes.data, array.shape, array.dtype, array)
        if isinstance(x, Batch):
            names = "tokens", "slots", "positions", "history", "kept"
            fields = {name: self.own(getattr(x, name)) for name in names}
            return replace(x, pages=tuple(self.own(each) for each in x.pages), **fields)
        if id(x) in self.twins:
            return self.twins[id(x)][0]
        if hasattr(x, "keys") and hasattr(x, "values"):
            return self.halves(x)
        if isinstance(x, tuple) and all(
            isinstance(each, np.ndarray) or id(each) in self.twins for each in x
        ):
            return tuple(self.own(each) for each in x)
        if isinstance(x, (DeltaWeights, NGramWeights, MixWeights, SharedExpert)):
            return replace(x, **{k: self.own(v) for k, v in vars(x).items()})
        return x

    def halves(self, kv: Any) -> CudaKv:
        """A reference's cache as the kernels' f16."""
        arch = self.kernels.arch
        parts = [self.kernels.array(halves(each, arch)) for each in (kv.keys, kv.values)]
        pages, _, heads, dim = kv.keys.shape
        values = kv.values.shape[3]
        return CudaKv(*parts, parts[0], pages, heads, dim, values, "f16", "f16")

    def back(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(self.back(each) for each in x)
        if not isinstance(x, DeviceArray):
            return x
        self.kept.append(x)
        return self.kernels.view(x)


def _method(name: str) -> Callable[..., Any]:
    def call(self: Mixed, *args: Any, **named: Any) -> Any:
        self.calls.add(name)
        made = getattr(self.kernels, name)(
            *(self.own(each) for each in args), **{k: self.own(v) for k, v in named.items()}
        )
        self.kernels.add_to_streams()  # the reference goes on
        return self.back(made)

    return call


HOST = {"ngram_expect", "add_to_streams"}  # arrays of the host's stay as they are
for _name in [n for n in vars(CudaFamilies) if not n.startswith("_") and n not in HOST]:
    setattr(Mixed, _name, _method(_name))


@pytest.mark.parametrize(("model", "kind", "prompt"), MODELS)
def test_logits(
    golden: Path, plan_for: Any, folder: Path, model: str, kind: str, prompt: str
) -> None:
    path = golden / model / f"model-{kind}.gguf"
    ids = np.array(json.loads((golden / model / "golden.json").read_text())["prompts"][prompt])
    ids = ids[:24].astype(np.int32)
    plan, found = plan_for(path, "reference"), []
    for ops in (ReferenceFamilyOps(), Mixed(folder)):
        with Gguf.open(path) as gguf:
            engine = Engine(plan, ops, gguf)
            engine.load()
            found.append(np.concatenate(list(engine.prompt_logits(ids))))
    assert ops.calls  # type: ignore[attr-defined]
    tolerance = EXACT if (model, kind) == ("qwen3moe", "f16") else TOLERANCE
    assert np.abs(found[1] - found[0]).max() <= tolerance * np.abs(found[0]).max()


@pytest.mark.parametrize(
    ("model", "kind", "staged"), [("qwen4exp", "f16", 8192), ("qwen4exp-k", "Q4_K_M", 24)]
)
def test_a_table_that_stays_in_the_file_changes_no_bit(
    golden: Path, plan_for: Any, folder: Path, model: str, kind: str, staged: int
) -> None:
    """staged 24: rows come in pieces."""
    path = golden / model / f"model-{kind}.gguf"
    plan, found = plan_for(path, "reference"), []
    for names in ({}, {"per_layer_token_embd.weight": 1}):
        with Gguf.open(path) as gguf:
            ops = Mixed(folder)
            ops.kernels.staged = staged
            engine = Engine(msgspec.structs.replace(plan, staged=names), ops, gguf)
            engine.load()
            logits = engine.prompt_logits(np.arange(40, 52, dtype=np.int32))
            found.append(np.concatenate(list(logits)))
            assert "ngram_gather" in ops.calls
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("model", ["qwen35", "qwen4exp"])
def test_two_prompts_in_a_step(
    mini: Path, plan_for: Any, drive: Any, folder: Path, model: str
) -> None:
    """A long one, and a short one behind it, which makes both count as generated."""
    path = mini / model / "model-f16.gguf"
    plan, found = plan_for(path, "reference"), []
    for ops in (ReferenceFamilyOps(), Mixed(folder)):
        with Gguf.open(path) as gguf:
            engine = Engine(plan, ops, gguf)
            engine.load()
            driver = drive(engine)
            rows = [
                driver.start(slot, list(range(40, 40 + n)), 8)[0] for slot, n in ((0, 40), (1, 5))
            ]
            answers = driver.step(rows)
            for _ in range(4):
                answers += driver.step([Row(slot=0), Row(slot=1)])
            found.append([answer.tokens for answer in answers])
    assert found[1] == found[0]
