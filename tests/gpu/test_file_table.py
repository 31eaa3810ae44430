"""An n-gram table that stays in its file: a thread of the driver's reads rows of it in the middle
of a step, and logits and tokens are those of a table in memory, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.gateway.cli.bench_ranks import open_ranks
from voltapile.shm.formats import row_bytes
from voltapile.workers.protocol import Row, Step

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
Make = Callable[..., Any]
ROWS, WIDTH, BEFORE = 500, 160, 77
MAPPED, VRAM, PINNED = ([f"ngram={place}"] for place in ("mapped", "vram", "pinned"))


@pytest.fixture(scope="module")
def families(ptx: Path | None) -> Any:
    from voltapile.kernels.cuda.family_ops import CudaFamilyOps

    return CudaFamilyOps(0, 256 << 20, ptx)


@pytest.fixture
def ops(families: Any) -> Iterator[Any]:
    families.reset_scratch()
    yield families
    families.prepare(lambda: None)


@pytest.mark.parametrize("type_name", ["IQ4_NL", "Q8_0", "F16"])
@pytest.mark.parametrize("tokens", [1, 8, 700])
def test_a_recorded_gather_reads_other_rows_each_time(
    ops: Any, tmp_path: Path, type_name: str, tokens: int
) -> None:
    """700 tokens have more rows than are read at once."""
    rng = np.random.default_rng(tokens)
    raw = rng.integers(0, 256, (ROWS, row_bytes(type_name, WIDTH))).astype(np.uint8)
    (tmp_path / "model").write_bytes(bytes(BEFORE) + raw.tobytes())
    inside = ops.weight(raw.reshape(-1), type_name, (ROWS, WIDTH))
    outside = ops.file_weight(str(tmp_path / "model"), BEFORE, type_name, (ROWS, WIDTH))
    rows = ops.zeros((tokens, 16), np.int64)
    ops.ngram_gather(inside, rows)  # compiled before it is recorded
    with ops.capture() as graph:
        found = [ops.ngram_gather(table, rows) for table in (inside, outside)]
    for _ in range(5):
        numbers = rng.integers(0, ROWS, rows.shape)
        numbers[0, :2] = -1, ROWS
        ops.upload(rows, numbers)
        graph.replay()
        both = [ops.to_host(each).view(np.uint32) for each in found]
        np.testing.assert_array_equal(*both)
    outside.stage.check()


def prompt(seed: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 250, tokens).astype(np.int32)


def test_logits(mini: Path, cuda_engine: Make) -> None:
    path, found = mini / "qwen4exp/model-f16.gguf", []
    for overrides in (VRAM, MAPPED):
        engine = cuda_engine(path, overrides=overrides)
        found.append(np.concatenate(list(engine.prompt_logits(prompt(0, 307)))))
    assert found[0].tobytes() == found[1].tobytes()


def test_tokens_of_several_streams(mini: Path, cuda_engine: Make, drive: Make) -> None:
    """Recorded steps of one row and of four; each is submitted before the Result of the one before
    it is taken."""
    path, found = mini / "qwen4exp/model-f16.gguf", []
    for overrides in (VRAM, MAPPED):
        engine = cuda_engine(path, overrides=overrides)
        driver = drive(engine)
        alone = [driver.generate(prompt(i, 9 + 30 * i), 12, slot=i) for i in range(4)]
        for slot in range(4):
            driver.step(driver.start(slot, prompt(slot, 9 + 30 * slot), 12))
        together: list[list[int]] = [[tokens[0]] for tokens in alone]
        pending = [engine.submit(all_go_on(100))]
        for number in range(1, 12):
            if number < 11:
                pending.append(engine.submit(all_go_on(100 + number)))
            for answer in engine.collect(pending.pop(0)).rows:
                together[answer.slot] += answer.tokens
        assert together == alone
        found.append(alone)
    assert found[0] == found[1]


def all_go_on(number: int) -> Step:
    return Step(id=number, rows=[Row(slot=slot) for slot in range(4)])


@pytest.mark.multigpu
@pytest.mark.parametrize("mode", ["experts", "layer"])
def test_two_gpus(mini: Path, plan_for: Make, drive: Make, ptx: Path | None, mode: str) -> None:
    """Each rank that has the table's layer reads for itself."""
    from voltapile.kernels.cuda.device import device_count

    if ptx is not None or device_count() < 2:
        pytest.skip("two GPUs, once")
    path, found = mini / "qwen4exp/model-f16.gguf", []
    for overrides in (PINNED, MAPPED):
        plan = plan_for(path, "cuda", ranks=2, split_mode=mode, overrides=overrides)
        assert bool(plan.staged) == (overrides is MAPPED)
        with open_ranks(plan) as ranks:
            found.append(drive(ranks).generate(prompt(5, 100), 24))
    assert found[0] == found[1]
