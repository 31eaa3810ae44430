"""Each row-wise Op on the GPU against its numpy twin, and the same bits in every company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import tiles
from voltapile.kernels.cuda.rows import FORMATS
from voltapile.kernels.reference.ops import ReferenceOps
from voltapile.shm.formats import format_of

pytestmark = pytest.mark.gpu


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def weight(ops: Any, values: np.ndarray) -> Any:
    return ops.weight(values.reshape(-1).view(np.uint8), "F32", values.shape)


def random_blocks(type_name: str, rows: int, columns: int) -> np.ndarray:
    """Bytes whose every float16 is finite, so that nothing becomes NaN."""
    kind = format_of(type_name)
    rng = np.random.default_rng(kind.id)
    count = rows * columns // kind.block_len
    data = rng.integers(0, 256, (count, kind.block_bytes), np.uint8)
    if type_name in ("F32", "F16", "BF16"):
        values = rng.standard_normal(rows * columns, np.float32)
        if type_name == "BF16":
            return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(
                np.uint8
            )
        return values.astype(np.float16 if type_name == "F16" else np.float32).view(np.uint8)
    # Whatever a format's float16 scales are, an exponent below 31 keeps them finite.
    data[:, 1::2] &= 0xBB
    return data.reshape(-1)


@pytest.mark.parametrize(
    ("type_name", "rows"), [*((name, 33) for name in FORMATS), *((n, 48) for n in tiles.FORMATS)]
)
def test_embed_is_exact(cuda: Any, put: Any, type_name: str, rows: int) -> None:
    data, shape = random_blocks(type_name, rows, 512), (rows, 512)
    tokens = np.array([0, 32, 5, 5, 31], np.int32)
    ref = ReferenceOps()
    for scale in (1.0, 45.25):
        ours = cuda.to_host(cuda.embed(cuda.weight(data, type_name, shape), put(tokens), scale))
        with np.errstate(all="ignore"):  # MXFP4 reaches infinity
            theirs = ref.embed(ref.weight(data, type_name, shape), tokens, scale)
        np.testing.assert_array_equal(ours, theirs)


def test_embed_of_no_token_is_not_finite(cuda: Any, put: Any) -> None:
    table = weight(cuda, normal(0, 3, 8))
    rows = cuda.to_host(cuda.embed(table, put(np.array([-1, 3, 2], np.int32))))
    assert np.isnan(rows[:2]).all()
    assert np.isfinite(rows[2]).all()


@pytest.mark.parametrize("cols", [1, 7, 40, 64, 128, 512, 516, 577, 896, 2560, 4096, 16384])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_rms_norm(cuda: Any, put: Any, rows: int, cols: int) -> None:
    x, w, old = normal(rows, rows, cols) * 10, normal(cols, cols), normal(7, rows, cols)
    ref = ReferenceOps()
    mine, theirs = weight(cuda, w), ref.rms_norm(x, weight(ref, w), 1e-5)
    ours = cuda.to_host(cuda.rms_norm(put(x), mine, 1e-5))
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)
    added = cuda.to_host(cuda.rms_norm(put(x), mine, 1e-5, add_to=put(old)))
    np.testing.assert_allclose(added, old + theirs, rtol=2e-6, atol=2e-6)
    alone = cuda.to_host(cuda.rms_norm(put(x[-1:]), mine, 1e-5))
    np.testing.assert_array_equal(alone[0], ours[-1])


def test_rms_norm_of_heads(cuda: Any, put: Any) -> None:
    x, w = normal(0, 5, 3 * 128), normal(1, 128)
    ref = ReferenceOps()
    ours = cuda.to_host(cuda.rms_norm(put(x), weight(cuda, w), 1e-6))
    np.testing.assert_allclose(ours, ref.rms_norm(x, weight(ref, w), 1e-6), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["norm", "neox"])
@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 32), (64, 16), (20, 10), (128, 64)])
def test_rope(cuda: Any, put: Any, head_dim: int, pairs: int, layout: str) -> None:
    positions = np.array([0, 1, 77, 4095, 131071], np.int32)
    inv_freq = (10000.0 ** (-np.arange(pairs) / pairs)).astype(np.float32)
    x = normal(0, 5, 3 * head_dim)
    ref = ReferenceOps()
    angles = cuda.rope_angles(put(positions), inv_freq, 1.25)
    theirs = ref.rope_angles(positions, inv_freq, 1.25)
    np.testing.assert_allclose(cuda.to_host(angles), theirs, atol=2e-7)
    ours = cuda.to_host(cuda.rope_(put(x), angles, head_dim, layout))
    np.testing.assert_allclose(ours, ref.rope_(x.copy(), theirs, head_dim, layout), atol=3e-6)


def test_angles_are_the_cosine_of_the_float32_product(cuda: Any, put: Any) -> None:
    positions, inv_freq = np.array([131071], np.int32), np.array([0.7310586], np.float32)
    angle = np.float64(np.float32(131071) * inv_freq[0])
    angles = cuda.to_host(cuda.rope_angles(put(positions), inv_freq, 1.0))
    expected = np.array([[[np.cos(angle), np.sin(angle)]]], np.float32)
    np.testing.assert_array_equal(angles, expected)


def test_gather_copy_and_softcap(cuda: Any, put: Any) -> None:
    x, index = normal(0, 9, 1030), np.array([8, 0, 0, 3], np.int32)
    ours = put(x)
    np.testing.assert_array_equal(cuda.to_host(cuda.gather(ours, put(index))), x[index])
    taken = cuda.copy(ours)
    cuda.softcap_(ours, 0.5)
    np.testing.assert_array_equal(cuda.to_host(taken), x)
    np.testing.assert_allclose(cuda.to_host(ours), 0.5 * np.tanh(x / 0.5), rtol=3e-6, atol=1e-7)


def test_arrays_and_uploads(cuda: Any, put: Any) -> None:
    x = np.arange(6 * 5, dtype=np.int32).reshape(6, 5)
    array = put(x)
    for key in (2, -1, slice(1, 4), (3, slice(1, 3)), slice(6, 6)):
        np.testing.assert_array_equal(cuda.to_host(array[key]), x[key])
    cuda.upload(array[2], np.array([7, 7], np.int32))
    x[2, :2] = 7
    np.testing.assert_array_equal(cuda.to_host(array), x)
    large = np.random.default_rng(0).integers(0, 99, 3_000_001, np.int32)  # more than the ring
    np.testing.assert_array_equal(cuda.to_host(put(large)), large)


def test_weights_arrive_whole(cuda: Any) -> None:
    """Small ones, and one of several chunks."""
    for rows in (1, 3, 5000):
        data = np.random.default_rng(rows).integers(0, 256, rows * 4096, np.uint8)
        mine = cuda.weight(data, "F32", (rows, 1024))
        from voltapile.kernels.cuda.launch import DeviceArray

        view = DeviceArray(mine.ptr, (rows * 4096,), np.uint8, mine)
        np.testing.assert_array_equal(cuda.to_host(view), data)


def test_a_recorded_step_replays(cuda: Any, put: Any) -> None:
    x = put(normal(0, 4, 64))
    w = weight(cuda, normal(1, 64))
    expected = cuda.to_host(cuda.rms_norm(x, w, 1e-6))
    cuda.reset_scratch()
    with cuda.capture() as graph:
        y = cuda.rms_norm(cuda.copy(x), w, 1e-6)
        angles = cuda.rope_angles(put_nothing(cuda), np.float32([0.1, 0.2, 0.3]), 1.0)
    graph.replay()
    np.testing.assert_array_equal(cuda.to_host(y), expected)
    assert cuda.to_host(angles)[0, 0, 0] == 1.0
    cuda.upload(x, np.zeros((4, 64), np.float32))
    graph.replay()
    assert not cuda.to_host(y).any()


def put_nothing(cuda: Any) -> Any:
    """Position 0, made before a capture would forbid it."""
    return cuda.constant(np.zeros(1, np.int32))


def test_prepare_loads_and_runs_nothing(cuda: Any, put: Any) -> None:
    x = put(normal(0, 2, 64))
    before = cuda.to_host(x)
    cuda.prepare(lambda: cuda.softcap_(x, 0.1))
    np.testing.assert_array_equal(cuda.to_host(x), before)
