"""NVFP4 with a factor of a tensor or of each expert: a whole model, the CPU against the reference.

The gguf package does not write the format, so a small golden model is quantised here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from voltapile.kernels.cpu.weights import unpack

from .test_golden_families import all_logits, check, mean_kl, prompts_of

Make = Callable[..., Any]
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
TYPE = gguf.GGMLQuantizationType.NVFP4


def scales() -> np.ndarray:
    """The value of each E4M3 byte up to 0x7E."""
    raw = np.zeros((127, 36), np.uint8)
    raw[:, 0], raw[:, 4] = np.arange(127), 2  # column 0: twice half of the scale
    return unpack(raw, int(TYPE), 127 * 64).reshape(127, 64)[:, 0]


def quantise(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [..., columns / 64 * 36] and the factor of each matrix."""
    flat = values.reshape(*values.shape[:-2], -1)
    factor = np.abs(flat).max(axis=-1, keepdims=True) / (6 * 448)
    parts = values.reshape(*values.shape[:-1], -1, 4, 16) / factor[..., None, None, None]
    known = scales()
    wanted = np.abs(parts).max(axis=-1) / 6
    chosen = np.abs(wanted[..., None] - known).argmin(axis=-1).astype(np.uint8)
    units = parts / np.maximum(known[chosen], 1e-9)[..., None]
    codes = np.abs(units[..., None] - FP4).argmin(axis=-1).astype(np.uint8)
    nibbles = codes[..., :8] | codes[..., 8:] << 4
    raw = np.concatenate([chosen, nibbles.reshape(*nibbles.shape[:-2], 32)], axis=-1)
    return raw.reshape(*values.shape[:-1], -1), factor.astype(np.float32).reshape(-1)


def write(source: Path, target: Path) -> int:
    """Returns how many tensors have become NVFP4."""
    file = gguf.GGUFReader(source)
    writer, changed = (
        gguf.GGUFWriter(target, str(file.fields["general.architecture"].contents())),
        0,
    )
    for field in file.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kinds = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), *kinds)
    for tensor in file.tensors:
        is_matrix = tensor.data.ndim > 1 and tensor.data.shape[-1] % 64 == 0
        if not is_matrix or not tensor.name.startswith("blk.") or "inp" in tensor.name:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        raw, factors = quantise(tensor.data.astype(np.float32))
        writer.add_tensor(tensor.name, raw, raw.shape, raw_dtype=TYPE)
        writer.add_tensor(tensor.name.replace(".weight", ".scale"), factors)
        changed += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return changed


@pytest.fixture(scope="session")
def nvfp4(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("nvfp4") / "model.gguf"
    assert write(data / "golden-mini/qwen3moe/model-f16.gguf", target) == 18
    return target


def test_cpu_against_reference(nvfp4: Path, mini: Path, engine_for: Make) -> None:
    check(nvfp4, prompts_of(mini / "qwen3moe"), 1e-6, engine_for)


def test_it_is_the_same_model(nvfp4: Path, mini: Path, engine_for: Make) -> None:
    """So coarse a format moves the answers, but not far: a factor that was left out would."""
    folder = mini / "qwen3moe"
    ids = next(iter(prompts_of(folder).values()))
    truth, engine = engine_for(folder / "model-f16.gguf"), engine_for(nvfp4)
    apart = mean_kl(all_logits(truth, ids), all_logits(engine, ids))
    assert 1e-4 < apart < 0.5


def test_greedy_tokens(nvfp4: Path, mini: Path, engine_for: Make, drive: Make) -> None:
    ids = next(iter(prompts_of(mini / "qwen3moe").values()))
    expected = drive(engine_for(nvfp4)).generate(ids, 8)
    assert drive(engine_for(nvfp4, "cpu")).generate(ids, 8) == expected
