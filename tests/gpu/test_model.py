"""Whole models on the GPU: against the reference, and against themselves for bits.

Bounds are the issue's: one twentieth of llama.cpp's own KL against exact dequantisation
(golden/TABLES.md) with f16 keys and values, one fifth with q8_0, 5e-5 for files that are not
quantised; and the same for a model whose activations have outliers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.workers.protocol import Row, Sampled, Sampling, Step, Want

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

Make = Callable[..., Any]

LLAMA_CPP_KL = {
    ("llama-tied", "f32"): 0.0,
    ("llama-tied", "Q8_0"): 3.6e-3,
    ("llama-tied", "Q4_0"): 3.7e-3,
    ("llama-tied", "Q4_K_M"): 7.4e-3,
    ("llama-untied", "Q8_0"): 1.9e-3,
    ("qwen2", "Q8_0"): 2.4e-3,
    ("qwen2", "Q4_K_M"): 5.0e-3,
    ("qwen3", "f16"): 0.0,
    ("qwen3", "Q4_K_M"): 2.4e-3,
    ("gemma3", "Q8_0"): 2.3e-3,
}
MINI = ("llama", "qwen2", "qwen3", "gemma3")
NOT_QUANTISED_KL = 5e-5
CONTEXT = 512


def mean_kl(truth: np.ndarray, other: np.ndarray) -> float:
    """Mean over positions of KL(truth || other), in float64."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        x = x - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    p, q = log_softmax(truth), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def all_logits(engine: Any, ids: list[int]) -> np.ndarray:
    return np.concatenate(list(engine.prompt_logits(np.asarray(ids, np.int32))))


def prompts_of(folder: Path) -> dict[str, list[int]]:
    return dict(json.loads((folder / "golden.json").read_text())["prompts"])


def divergence(truth: Any, engine: Any, folder: Path) -> float:
    """The mean KL over all positions of all prompts."""
    prompts = prompts_of(folder).values()
    ours, theirs = (
        np.concatenate([all_logits(each, ids) for ids in prompts]) for each in (engine, truth)
    )
    return mean_kl(theirs, ours)


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize(("model", "kind"), LLAMA_CPP_KL)
def test_kl(
    golden: Path, engine_for: Make, cuda_engine: Make, model: str, kind: str, kv: str
) -> None:
    folder, theirs = golden / model, LLAMA_CPP_KL[model, kind]
    path = folder / f"model-{kind}.gguf"
    try:
        engine = cuda_engine(path, cache_type_k=kv, cache_type_v=kv)
    except ValueError as error:  # heads that q8_0 does not divide
        pytest.skip(str(error))
    bound = theirs / (20 if kv == "f16" else 5) if theirs else NOT_QUANTISED_KL
    if not theirs and kv != "f16":
        pytest.skip("no bound is set for a quantised cache of a file that is not")
    assert divergence(engine_for(path), engine, folder) <= bound


@pytest.mark.parametrize("model", MINI)
def test_kl_mini(mini: Path, engine_for: Make, cuda_engine: Make, model: str) -> None:
    path = mini / model / "model-f16.gguf"
    found = divergence(engine_for(path), cuda_engine(path), mini / model)
    assert found <= NOT_QUANTISED_KL


@pytest.mark.parametrize("model", MINI[:3])
def test_kl_with_outliers(
    mini: Path,
    tmp_path: Path,
    with_outliers: Make,
    engine_for: Make,
    cuda_engine: Make,
    model: str,
) -> None:
    path = with_outliers(mini / model / "model-f16.gguf", tmp_path / "outliers.gguf")
    found = divergence(engine_for(path), cuda_engine(path), mini / model)
    assert found <= NOT_QUANTISED_KL


# --- bits ---------------------------------------------------------------------------------------


class Stream:
    """One request of several that are computed together."""

    def __init__(self, driver: Any, slot: int, prompt: list[int], room: int) -> None:
        self.slot, self.answers = slot, list[Sampled]()
        (self.first,) = driver.start(slot, prompt, room, temperature=0.8, seed=slot * 77)
        self.first.want = Want(logprobs=20)

    @property
    def said(self) -> list[tuple[list[int], Any]]:
        return [(answer.tokens, answer.logprobs) for answer in self.answers]


def run_together(engine: Any, drive: Make, prompts: list[list[int]], count: int) -> list[Stream]:
    """Each prompt is computed alone, then all go on in steps of one row each."""
    driver = drive(engine)
    streams = [Stream(driver, slot, prompt, count) for slot, prompt in enumerate(prompts)]
    for stream in streams:
        stream.answers += driver.step([stream.first])
    for _ in range(count - 1):
        rows = [Row(slot=stream.slot) for stream in streams]
        for stream, answer in zip(streams, driver.step(rows), strict=True):
            stream.answers.append(answer)
    for stream in streams:
        driver.release(stream.slot)
    return streams


@pytest.fixture
def prompts(mini: Path) -> list[list[int]]:
    """Eight prompts of different lengths."""
    ids = prompts_of(mini / "llama")["p61"]
    return [ids[start : start + 5 + 7 * start] for start in range(8)]


@pytest.mark.parametrize("model", MINI)
def test_bits_do_not_depend_on_company(
    mini: Path, cuda_engine: Make, drive: Make, prompts: list[list[int]], model: str
) -> None:
    """Tokens and log-probabilities of 1 to 8 rows in a step, bit for bit."""
    engine = cuda_engine(mini / model / "model-f16.gguf", slots=8, context=CONTEXT)
    alone = [run_together(engine, drive, [prompt], 12)[0] for prompt in prompts[:1]]
    whole = run_together(engine, drive, prompts, 12)
    assert whole[0].said == alone[0].said
    for rows in range(2, 8):
        part = run_together(engine, drive, prompts[:rows], 12)
        assert [s.said for s in part] == [s.said for s in whole[:rows]]


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_replayed_steps_and_second_runs_have_the_same_bits(
    mini: Path, cuda_engine: Make, drive: Make, prompts: list[list[int]], kv: str
) -> None:
    path = mini / "qwen3" / "model-f16.gguf"
    try:
        engine = cuda_engine(path, slots=8, cache_type_k=kv, cache_type_v=kv)
    except ValueError as error:
        pytest.skip(str(error))
    assert engine.graphs
    first = [s.said for s in run_together(engine, drive, prompts, 10)]
    assert [s.said for s in run_together(engine, drive, prompts, 10)] == first
    engine.graphs.clear()
    assert [s.said for s in run_together(engine, drive, prompts, 10)] == first


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("batch", [64, 128])
def test_recorded_chunks_have_the_bits_of_eager_ones(
    mini: Path, cuda_engine: Make, drive: Make, model: str, batch: int
) -> None:
    """By the few-row engine and by cuBLAS, at several places of a prompt."""
    engine = cuda_engine(mini / model / "model-f16.gguf", context=512, batch_tokens=batch)
    prompt = np.random.default_rng(9).integers(0, 640, 3 * batch).tolist()

    def said() -> list[Any]:
        driver, found = drive(engine), []
        rows = driver.start(0, prompt, 8, chunk=batch)
        rows[0].want = Want(logprobs=4)
        for row in rows:
            found += driver.step([row])
        for _ in range(7):
            found += driver.step([Row(slot=0)])
        driver.release(0)
        return [(answer.tokens, answer.logprobs) for answer in found]

    assert set(engine.chunks) == {0, 1}
    recorded = said()
    engine.chunks = {}
    assert said() == recorded


def test_verify_rows_equal_single_rows(
    mini: Path, cuda_engine: Make, drive: Make, prompts: list[list[int]]
) -> None:
    """Several tokens of one slot in a step give the logits that they give one at a time."""
    engine = cuda_engine(mini / "qwen3" / "model-f16.gguf", slots=8)
    ids = np.asarray(prompts[7], np.int32)
    engine.caches.begin_request(0, Sampling())
    engine.caches.append(0, [[1, 2] for _ in engine.plan.caches])

    def logits(start: int, stop: int) -> np.ndarray:
        engine.ops.reset_scratch()
        batch = engine.buffer.fill_all_outputs(0, ids[start:stop], start)
        hidden, _ = engine.model.forward(batch, engine.caches.layers)
        return np.asarray(engine.ops.to_host(engine.model.head(hidden)))

    single = np.concatenate([logits(i, i + 1) for i in range(24)])
    for rows in range(2, 9):
        together = np.concatenate([logits(i, i + rows) for i in range(0, 24 - rows + 1, rows)])
        np.testing.assert_array_equal(together, single[: len(together)])


def test_steps_submitted_ahead_give_the_same(mini: Path, cuda_engine: Make, drive: Make) -> None:
    """The host prepares a step, and reads the one before it, while another is computed."""
    driver = drive(cuda_engine(mini / "llama/model-f16.gguf"))
    engine, prompt = driver.engine, list(range(40, 110))
    expected = driver.generate(prompt, 40)
    steps = [Step(id=0, rows=driver.start(0, prompt, 40))]
    steps += [Step(id=i, rows=[Row(slot=0)]) for i in range(1, 40)]
    found, pending = [], [engine.submit(steps[0])]
    for step in steps[1:]:
        pending.append(engine.submit(step))
        found += engine.collect(pending.pop(0)).rows[0].tokens
    found += engine.collect(pending.pop()).rows[0].tokens
    assert found == expected


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_a_row_that_is_not_finite_ends_with_the_layer_named(
    mini: Path, cuda_engine: Make, drive: Make, prompts: list[list[int]], kv: str
) -> None:
    """The other row goes on as if it were alone."""
    path = mini / "qwen3" / "model-f16.gguf"
    driver = drive(cuda_engine(path, cache_type_k=kv, cache_type_v=kv))
    expected = driver.generate(prompts[1], 3)
    driver.step(driver.start(0, prompts[0], 4))
    tokens = list(driver.step(driver.start(1, prompts[1], 4))[0].tokens)
    driver.poison(layer=2, slot=0)
    answers = driver.step([Row(slot=0), Row(slot=1)])
    assert (answers[0].finish, answers[0].tokens) == ("error", [])
    assert answers[0].error == "rank 0: non-finite logits (in layer 2)"
    tokens += answers[1].tokens
    answers = driver.step([Row(slot=0), Row(slot=1)])
    assert answers[0].tokens == []
    assert tokens + answers[1].tokens == expected
