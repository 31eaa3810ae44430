"""A file's tensors in the backend's form: fused and split projections give the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from voltapile.kernels.reference.families import ReferenceFamilyOps
from voltapile.kernels.reference.ops import ReferenceOps, dequantize
from voltapile.shm.gguf import Gguf, Tensor
from voltapile.topology.architectures import spec_of
from voltapile.topology.share import tensor_shares, whole
from voltapile.workers.models.blocks import qkv
from voltapile.workers.models.experts import ExpertFFN
from voltapile.workers.models.hybrid import DeltaNet
from voltapile.workers.models.registry import model_class
from voltapile.workers.weights import FileWeights


def test_every_byte_is_counted(mini: Path) -> None:
    seen: list[float] = []
    with Gguf.open(mini / "llama/model-f16.gguf") as file:
        spec, ops = spec_of(file), ReferenceOps()
        weights = FileWeights(file, ops, spec, whole(spec), seen.append)
        model_class("llama")(spec, whole(spec), weights, ops)
    assert seen == sorted(seen)
    assert 0.99 < seen[-1] <= 1.0


@pytest.mark.parametrize("is_uploaded", [False, True])
def test_what_was_uploaded_is_not_held(
    mini: Path, monkeypatch: pytest.MonkeyPatch, is_uploaded: bool
) -> None:
    """Tensors that are read again, as a tied embedding's, are still there."""
    forgotten: list[str] = []
    with Gguf.open(mini / "llama/model-f16.gguf") as file:
        spec, ops, forget = spec_of(file), ReferenceOps(), file.forget
        monkeypatch.setattr(file, "forget", lambda name: (forgotten.append(name), forget(name)))
        weights = FileWeights(file, ops, spec, whole(spec), is_uploaded=is_uploaded)
        model_class("llama")(spec, whole(spec), weights, ops)
        expected = set(file.tensors) - {"rope_freqs.weight"} if is_uploaded else set()
        assert set(forgotten) == expected
        again = weights("token_embd.weight")
        assert np.isfinite(ops.dense(again)).all()


def test_a_missing_tensor_is_named(mini: Path) -> None:
    with Gguf.open(mini / "llama/model-f16.gguf") as file:
        weights = FileWeights(file, ReferenceOps(), spec_of(file), whole(spec_of(file)))
        with pytest.raises(ValueError, match=r"blk\.9\.attn_q\.weight"):
            weights("blk.9.attn_q.weight")
        assert weights.optional("blk.0.attn_q.bias") is None
        assert weights.fused("blk.0.attn_qkv.weight") == ()


def test_tensors_are_stacked(mini: Path) -> None:
    ops, blk = ReferenceOps(), "blk.0.attn"
    with Gguf.open(mini / "llama/model-f16.gguf") as file:
        spec = spec_of(file)
        weights = FileWeights(file, ops, spec, whole(spec))
        k, v = (weights(f"{blk}_{name}.weight") for name in "kv")
        parts = [ops.dense(each) for each in (k, v)]
        names = f"{blk}_k.weight", f"{blk}_v.weight"
        found = weights.stacked(names)
        assert found.type_name == "F16"  # type: ignore[attr-defined]
        np.testing.assert_array_equal(ops.dense(found), np.concatenate(parts))
        with pytest.raises(ValueError, match="ssm_alpha"):
            weights.stacked((names[0], "blk.0.ssm_alpha.weight"))
    with Gguf.open(mini / "qwen3moe/model-f16.gguf") as file:
        spec = spec_of(file)
        weights = FileWeights(file, ops, spec, whole(spec))
        names = f"{blk}_k.weight", "blk.0.ffn_gate_inp.weight"
        found = weights.stacked(names)
        assert found.type_name == "F32"  # type: ignore[attr-defined]
        expected = np.concatenate([ops.dense(weights(name)) for name in names])
        np.testing.assert_array_equal(ops.dense(found), expected)


def test_a_fused_projection_is_cut(mini: Path, tmp_path: Path) -> None:
    ops = ReferenceOps()
    path = tmp_path / "fused.gguf"
    with Gguf.open(mini / "llama/model-f16.gguf") as file:
        spec = spec_of(file)
        split, _ = qkv(FileWeights(file, ops, spec, whole(spec)), "blk.0")
        parts = [ops.dense(part) for part in split]
    bias = np.arange(sum(len(part) for part in parts), dtype=np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_qkv.weight", np.concatenate(parts).astype(np.float16))
    writer.add_tensor("blk.0.attn_qkv.bias", bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with Gguf.open(path) as file:
        cut, biases = qkv(FileWeights(file, ops, spec, whole(spec)), "blk.0")
        for piece, found in zip(parts, cut, strict=True):
            np.testing.assert_array_equal(ops.dense(found), piece)
        found = np.concatenate([ops.dense(b) for b in biases if b is not None])
        np.testing.assert_array_equal(found, bias)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ValueError, match="'mamba' is not supported; supported: gemma3, llama, q"):
        model_class("mamba")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
def test_ranks_have_what_together_is_the_whole(golden: Path, kind: str, ranks: int) -> None:
    """Rows are cut anywhere, columns at blocks; a block that two ranks need is kept by both."""
    ops = ReferenceOps()
    with Gguf.open(golden / f"llama-tied/model-{kind}.gguf") as file:
        spec = spec_of(file)
        shares = tensor_shares(spec, [1.0] * ranks, 256 if kind == "Q4_K_M" else 32)
        parts = [FileWeights(file, ops, spec, share) for share in shares]
        alone = FileWeights(file, ops, spec, whole(spec))
        for name, begin in (("attn_q", "heads"), ("attn_v", "kv_heads"), ("ffn_up", "ffn")):
            dense = ops.dense(alone(f"blk.1.{name}.weight"))
            size = {"ffn": 1}.get(begin, spec.key_dim)
            for share, weights in zip(shares, parts, strict=True):
                first, last = getattr(share, begin)
                found = weights.optional(f"blk.1.{name}.weight")
                rows = dense[first * size : last * size]
                assert (found is None) == (len(rows) == 0)
                if found is not None:
                    np.testing.assert_array_equal(ops.dense(found), rows)
        for name, begin in (("attn_output", "heads"), ("ffn_down", "ffn")):
            dense = ops.dense(alone(f"blk.1.{name}.weight"))
            size = {"ffn": 1}.get(begin, spec.value_dim)
            for share, weights in zip(shares, parts, strict=True):
                first, last = (edge * size for edge in getattr(share, begin))
                found = weights.optional(f"blk.1.{name}.weight")
                assert (found is None) == (first == last)
                if found is not None:
                    start = weights.first_column(f"blk.1.{name}.weight")
                    assert start <= first < last <= start + found.shape[1]
                    columns = dense[:, start : start + found.shape[1]]
                    np.testing.assert_array_equal(ops.dense(found), columns)


def test_only_cut_columns_are_copied(mini: Path, plan_for: Callable[..., Any]) -> None:
    """Into the bytes that the Plan has for them; the file is not copied."""
    plan = plan_for(mini / "llama/model-f16.gguf", "cpu", ranks=2)
    with Gguf.open(plan.model[0]) as file:
        spec, ops = spec_of(file), ReferenceOps()
        for rank in plan.ranks:
            weights = FileWeights.of_plan(file, ops, spec, plan, rank.rank, lambda fraction: None)
            assert weights.pages is not None
            assert weights.pages.nbytes == rank.memory["weights"]
            model = model_class("llama")(spec, rank.share, weights, ops)
            for layer, block in model.blk.items():
                down, up = block.ffn.ffn_down.weight.data, block.ffn.ffn_up.data
                assert not np.shares_memory(down, file.data(f"blk.{layer}.ffn_down.weight"))
                assert np.shares_memory(up, file.data(f"blk.{layer}.ffn_up.weight"))
            assert 0.99 < weights.done / weights.total <= 1
    one = plan_for(mini / "llama/model-f16.gguf", "cpu")
    assert one.ranks[0].memory["weights"] == 0


class Nvfp4File:
    """As much of a Gguf as weights look at: three experts of NVFP4, and a factor of each."""

    def __init__(self, factors: np.ndarray) -> None:
        random = np.random.default_rng(6)
        self.path, self.metadata = "nvfp4.gguf", {}
        self.raw = random.integers(0, 120, (3, 4, 36), dtype=np.uint8)
        self.held = {"blk.0.ffn_up_exps.weight": self.raw, "blk.0.ffn_up_exps.scale": factors}
        kinds = {"weight": ("NVFP4", (3, 4, 64)), "scale": ("F32", factors.shape)}
        self.tensors = {
            name: Tensor(name, kind, 0, shape, data.nbytes, 0, 0)
            for (name, data), (kind, shape) in zip(self.held.items(), kinds.values(), strict=True)
        }

    def data(self, name: str) -> np.ndarray:
        return self.held[name].reshape(-1).view(np.uint8)


@pytest.mark.parametrize("factors", [np.array([0.5]), np.array([0.5, 2.0, 3.0])])
def test_the_factor_of_a_tensor_is_in_another_one(mini: Path, factors: np.ndarray) -> None:
    file, ops = Nvfp4File(factors.astype(np.float32)), ReferenceOps()
    with Gguf.open(mini / "qwen3moe/model-f16.gguf") as model:
        spec = spec_of(model)
    share = msgspec.structs.replace(whole(spec), experts=(1, 3), expert_ffn=(0, 4))
    found = FileWeights(file, ops, spec, share)("blk.0.ffn_up_exps.weight")  # type: ignore[arg-type]
    plain = dequantize(file.raw[1:].reshape(8, 36), "NVFP4").reshape(2, 4, 64)
    expected = plain * np.broadcast_to(factors, 3)[1:, None, None]
    np.testing.assert_array_equal(ops.dense(found), expected.astype(np.float32))
    with pytest.raises(ValueError, match="has a scale, which the plain backend does not compute"):
        FileWeights(file, PlainOps(), spec, share)("blk.0.ffn_up_exps.weight")  # type: ignore[arg-type]


class OlderFile:
    """A qwen3next file with ssm_in instead of attn_qkv and attn_gate: by key head q, k, v, z."""

    def __init__(self, file: Gguf, spec: Any) -> None:
        self.file, self.path, self.metadata = file, file.path, file.metadata
        delta, blk = spec.delta, "blk.0"
        raw = [self._rows(f"{blk}.{name}.weight") for name in ("attn_qkv", "attn_gate")]
        dim, keys = delta.head_dim, delta.key_heads * delta.head_dim
        values = delta.value_heads * dim
        q, k, v = np.split(raw[0], [keys, 2 * keys])
        by_head = [part.reshape(delta.key_heads, -1, part.shape[1]) for part in (q, k, v, raw[1])]
        self.ssm_in = np.concatenate(by_head, axis=1).reshape(2 * (keys + values), -1)
        one = file.tensors[f"{blk}.attn_qkv.weight"]
        shape = len(self.ssm_in), one.shape[1]
        own = dataclasses.replace(one, name=SSM_IN, shape=shape, nbytes=self.ssm_in.nbytes)
        gone = f"{blk}.attn_qkv.weight", f"{blk}.attn_gate.weight"
        self.tensors = {n: each for n, each in file.tensors.items() if n not in gone}
        self.tensors[SSM_IN] = own

    def _rows(self, name: str) -> np.ndarray:
        return self.file.data(name).reshape(self.file.tensors[name].shape[0], -1)

    def data(self, name: str) -> np.ndarray:
        return self.ssm_in.reshape(-1) if name == SSM_IN else self.file.data(name)


SSM_IN = "blk.0.ssm_in.weight"


@pytest.mark.parametrize("heads", [[0], [1], [0, 1]])
def test_projections_of_older_files(mini: Path, heads: list[int]) -> None:
    with Gguf.open(mini / "qwen3next/model-f16.gguf") as file:
        spec, ops = spec_of(file), ReferenceOps()
        assert spec.delta is not None
        ratio = spec.delta.value_heads // spec.delta.key_heads
        values = [head * ratio + i for head in heads for i in range(ratio)]
        share = msgspec.structs.replace(whole(spec), key_heads=heads, value_heads=values)
        new, old = (
            DeltaNet(spec, share, FileWeights(each, ops, spec, share), 0, ops)  # type: ignore[arg-type]
            for each in (file, OlderFile(file, spec))
        )
        for one, other in zip(new.projections, old.projections, strict=True):
            np.testing.assert_array_equal(ops.dense(one), ops.dense(other))


class FusedFile:
    """A file whose experts have gate and up in one tensor."""

    def __init__(self, file: Gguf) -> None:
        self.file, self.path, self.metadata = file, file.path, file.metadata
        names = [f"blk.0.ffn_{name}_exps.weight" for name in ("gate", "up")]
        one = file.tensors[names[0]]
        count, ffn, width = one.shape
        both = [file.data(name).reshape(count, ffn, -1) for name in names]
        self.fused = np.concatenate(both, axis=1)
        own = dataclasses.replace(one, shape=(count, 2 * ffn, width), nbytes=2 * one.nbytes)
        self.tensors = {n: each for n, each in file.tensors.items() if n not in names}
        self.tensors[GATE_UP] = own

    def data(self, name: str) -> np.ndarray:
        return self.fused.reshape(-1) if name == GATE_UP else self.file.data(name)


GATE_UP = "blk.0.ffn_gate_up_exps.weight"


@pytest.mark.parametrize("part", [(0, 32), (0, 16), (16, 32)])
def test_gate_and_up_in_one_tensor(mini: Path, part: tuple[int, int]) -> None:
    """Of some experts, whole or a part of each."""
    with Gguf.open(mini / "qwen3moe/model-f16.gguf") as file:
        spec, ops = spec_of(file), ReferenceFamilyOps()
        share = msgspec.structs.replace(whole(spec), experts=(2, 9), expert_ffn=part)
        plain, fused = (
            ExpertFFN(spec, share, FileWeights(each, ops, spec, share), 0, ops).table  # type: ignore[arg-type]
            for each in (file, FusedFile(file))
        )
        for name in ("gate", "up", "down"):
            one, other = (ops.dense(getattr(table, name)) for table in (plain, fused))
            np.testing.assert_array_equal(one, other)
        assert ops.dense(plain.gate).shape == (7, part[1] - part[0], 64)


class PlainOps:
    name = "plain"
