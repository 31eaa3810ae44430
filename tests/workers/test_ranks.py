"""Several ranks give the tokens of one, by parts of each matrix and by layers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.topology.plan import PlanError
from voltapile.workers.protocol import Row, Step, Want

Make = Callable[..., Any]
MINI = ("llama", "qwen2", "qwen3", "gemma3")
IDS = np.random.default_rng(4).integers(0, 640, 90).tolist()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("model", MINI)
def test_tensor_mode(
    mini: Path, engine_for: Make, ranks_for: Make, drive: Make, model: str, ranks: int, backend: str
) -> None:
    path = mini / model / "model-f16.gguf"
    alone = engine_for(path, backend)
    group = ranks_for(path, backend, ranks=ranks, split_mode="tensor", threads=1)
    ids = np.asarray(IDS, np.int32)
    expected = np.concatenate(list(alone.prompt_logits(ids)))
    found = np.concatenate(list(group.prompt_logits(ids)))
    assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()
    assert drive(group).generate(IDS, 12) == drive(alone).generate(IDS, 12)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("model", MINI)
def test_layer_mode(
    mini: Path, engine_for: Make, ranks_for: Make, drive: Make, model: str, ranks: int, backend: str
) -> None:
    """The very bits: nothing is summed in another order."""
    path = mini / model / "model-f16.gguf"
    try:
        group = ranks_for(path, backend, ranks=ranks, split_mode="layer", threads=1)
    except PlanError as error:
        pytest.skip(str(error))
    alone = engine_for(path, backend)
    ids = np.asarray(IDS, np.int32)
    expected = np.concatenate(list(alone.prompt_logits(ids)))
    np.testing.assert_array_equal(np.concatenate(list(group.prompt_logits(ids))), expected)
    assert drive(group).generate(IDS, 12, chunk=64) == drive(alone).generate(IDS, 12)


@pytest.mark.parametrize("mode", ["single", "tensor", "layer"])
@pytest.mark.parametrize("model", MINI)
def test_memory_is_as_planned(mini: Path, ranks_for: Make, model: str, mode: str) -> None:
    options = {} if mode == "single" else {"ranks": 2, "split_mode": mode}
    group = ranks_for(mini / model / "model-f16.gguf", "cpu", context=1024, **options)
    for rank, engine in zip(group.plan.ranks, group.engines, strict=True):
        memory = engine.memory()
        assert set(memory) | {"reserve"} >= {name for name, size in rank.memory.items() if size}
        for purpose, (planned, allocated) in memory.items():
            assert allocated <= planned * 1.02, purpose
        planned, allocated = map(sum, zip(*memory.values(), strict=True))
        assert allocated == pytest.approx(planned, rel=0.02)


GOLDENS = [
    ("llama-tied", "f32"),
    ("llama-tied", "Q8_0"),
    ("llama-tied", "Q4_0"),
    ("llama-tied", "Q4_K_M"),
    ("llama-untied", "Q8_0"),
    ("qwen2", "Q8_0"),
    ("qwen2", "Q4_K_M"),
    ("qwen3", "f16"),
    ("qwen3", "Q4_K_M"),
    ("gemma3", "Q8_0"),
]
MARGIN = 1e-3  # of the largest logit: a token that wins by less may change with the order of sums


def check_greedy(alone: Any, group: Any, drive: Make, ids: list[int], count: int) -> int:
    """The tokens of one rank, up to the first that wins by less than the tolerance; how many."""
    expected, found = drive(alone).generate(ids, count), drive(group).generate(ids, count)
    whole = np.asarray(ids + expected[:-1], np.int32)
    logits = np.concatenate(list(alone.prompt_logits(whole)))[len(ids) - 1 :]
    best = np.sort(logits, axis=1)[:, -2:]
    close = np.flatnonzero(best[:, 1] - best[:, 0] < MARGIN * np.abs(logits).max(axis=1))
    end = int(close[0]) if len(close) else count
    assert found[:end] == expected[:end]
    return end


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize(("model", "kind"), [*GOLDENS, *((name, "mini") for name in MINI)])
def test_every_golden_on_many_ranks(
    request: pytest.FixtureRequest,
    mini: Path,
    engine_for: Make,
    ranks_for: Make,
    drive: Make,
    model: str,
    kind: str,
    ranks: int,
    mode: str,
) -> None:
    folder = (mini if kind == "mini" else request.getfixturevalue("golden")) / model
    path = folder / ("model-f16.gguf" if kind == "mini" else f"model-{kind}.gguf")
    try:
        group = ranks_for(path, "cpu", ranks=ranks, split_mode=mode)
    except PlanError as error:
        pytest.skip(str(error))  # fewer layers than ranks
    alone = engine_for(path, "cpu")
    prompts = json.loads((folder / "golden.json").read_text())["prompts"]
    compared = [check_greedy(alone, group, drive, ids, 16) for ids in prompts.values()]
    assert sum(compared) >= len(compared) * 8, "margins leave too little to compare"
    for engine in group.engines:
        for planned, allocated in engine.memory().values():
            assert allocated <= planned * 1.02


MODES = pytest.mark.parametrize("mode", ["tensor", "layer"])


def poison(engine: Any, layer: int, slot: int) -> None:
    """NaN into what this rank keeps of a slot in a layer; nothing if another has it."""
    if layer in engine.share.layers:
        cache = engine.caches.layers[engine.share.layers.index(layer)]
        cache.kv.keys[engine.caches.tables[cache.group][slot, 0]] = np.nan


@MODES
@pytest.mark.parametrize("backend", ["reference"])
def test_logits_that_are_not_finite(
    mini: Path, ranks_for: Make, drive: Make, backend: str, mode: str
) -> None:
    """The search needs nobody else: a rank that runs ahead does not wait in it."""
    group = ranks_for(mini / "llama/model-f16.gguf", backend, ranks=2, split_mode=mode)
    driver = drive(group)
    for slot in range(2):
        driver.step(driver.start(slot, IDS[:20], 8))
    group.each(lambda engine: poison(engine, 2, 0))
    answers = driver.step([Row(slot=0), Row(slot=1)])
    assert (answers[0].finish, answers[1].finish) == ("error", "")
    rank, since = group.plan.answer_rank, " or before" if mode == "layer" else ""
    assert answers[0].error == (
        f"rank {rank}: non-finite logits (first in the keys and values of layer 2{since})"
    )
    assert driver.step([Row(slot=0), Row(slot=1)])[0].tokens == []


@MODES
def test_probabilities(
    mini: Path, engine_for: Make, ranks_for: Make, drive: Make, mode: str
) -> None:
    """Of prompt and answer, while another slot decodes; all ranks compute what one answers."""
    path = mini / "llama/model-f16.gguf"
    found = []
    for engine in (
        engine_for(path, "cpu"),
        ranks_for(path, "cpu", ranks=2, split_mode=mode),
    ):
        driver = drive(engine)
        driver.step(driver.start(0, IDS[:20], 8))
        rows = driver.start(1, IDS, 8, chunk=64, prompt_tokens=len(IDS))
        rows[0].want = Want(logprobs=3, prompt_logprobs=2)
        answers = [answer for row in rows for answer in driver.step([Row(slot=0), row])]
        answers += driver.step([Row(slot=0), Row(slot=1)])
        lists = [each for answer in answers for each in answer.prompt_logprobs + answer.logprobs]
        found.append([pair for each in lists for pair in each])
    ids, others = ([pair[0] for pair in pairs] for pairs in found)
    assert len(ids) == 3 * (len(IDS) - 1) + 2 * 4
    assert ids == others
    alone, group = (np.array([pair[1] for pair in pairs]) for pairs in found)
    np.testing.assert_allclose(group, alone, atol=2e-3 if mode == "tensor" else 0)


@MODES
def test_a_pooled_state(
    mini: Path, engine_for: Make, ranks_for: Make, drive: Make, mode: str
) -> None:
    """All ranks compute what one answers."""
    path, found = mini / "llama/model-f16.gguf", []
    for engine in (
        engine_for(path, "cpu"),
        ranks_for(path, "cpu", ranks=2, split_mode=mode),
    ):
        driver = drive(engine)
        rows = driver.start(1, IDS, 1, chunk=64, prompt_tokens=len(IDS))
        rows[0].want = Want(hidden=True)
        [*_, answer] = [answer for row in rows for answer in driver.step([row])]
        found.append(answer.hidden)
    alone, group = found
    np.testing.assert_allclose(group, alone, atol=2e-3 if mode == "tensor" else 0)


@MODES
def test_company_and_preemption(mini: Path, ranks_for: Make, drive: Make, mode: str) -> None:
    """A slot is released and taken again; sampled tokens depend on their own request only."""
    group = ranks_for(mini / "gemma3/model-f16.gguf", "cpu", ranks=2, split_mode=mode)
    driver = drive(group)
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1}
    expected = [driver.generate(ids, 8, **sampling) for ids in (IDS[:30], IDS[30:])]
    rows = driver.start(2, IDS[:30], 8, **sampling) + driver.start(0, IDS[30:], 8, **sampling)
    tokens = [list(answer.tokens) for answer in driver.step(rows)]
    for _ in range(7):
        for mine, answer in zip(tokens, driver.step([Row(slot=2), Row(slot=0)]), strict=True):
            mine += answer.tokens
    assert tokens == expected
    group.each(lambda engine: engine.forget())
    driver.held.clear()
    driver.free = [list(range(1, cache.pages)) for cache in group.plan.caches]
    assert driver.generate(IDS[:30], 8, **sampling) == expected[0]


def test_chunks_pass_through_the_stages(mini: Path, ranks_for: Make, drive: Make) -> None:
    """The first stage is done with chunks that the last one has not begun, and nothing changes."""
    group = ranks_for(
        mini / "llama/model-f16.gguf", "cpu", ranks=2, split_mode="layer", context=512
    )
    driver, last = drive(group), group.engines[1]
    prompt = np.random.default_rng(6).integers(0, 640, 256).tolist()
    expected = driver.generate(prompt, 4, chunk=64)
    forward, may_begin, begun = last.model.forward, threading.Event(), []

    def late(*args: Any) -> Any:
        begun.append(may_begin.wait(20))
        return forward(*args)

    last.model.forward = late
    rows = driver.start(0, prompt, 4, chunk=64)
    steps = [Step(id=i, rows=[row]) for i, row in enumerate(rows)]
    answers = [group.ask(lambda engine, step=step: engine.run(step)) for step in steps]
    for first, _ in answers[:2]:
        first.result(20)
    assert not begun
    may_begin.set()
    tokens = answers[-1][1].result(20).rows[0].tokens
    last.model.forward = forward
    for _ in range(3):
        tokens += driver.step([Row(slot=0)])[0].tokens
    assert tokens == expected


@MODES
@pytest.mark.parametrize("model", ["llama", "gemma3", "qwen35moe"])
def test_scratch_is_enough(mini: Path, ranks_for: Make, drive: Make, model: str, mode: str) -> None:
    """The largest prompt step, all slots at once, and prompt probabilities stay below the plan."""
    group = ranks_for(
        mini / model / "model-f16.gguf", "cpu", ranks=2, split_mode=mode, context=1024
    )
    driver, random = drive(group), np.random.default_rng(8)
    size = group.plan.batch_tokens // 4
    prompts = [random.integers(0, 650, size).tolist() for _ in range(4)]
    rows = [row for slot in range(4) for row in driver.start(slot, prompts[slot], 8)]
    assert all(answer.tokens for answer in driver.step(rows))
    driver.step([Row(slot=slot) for slot in range(4)])
    for slot in range(4):
        driver.release(slot)
    long = random.integers(0, 650, 1000).astype(np.int32)
    assert sum(len(piece) for piece in group.prompt_logits(long)) == 1000
    for rank, engine in zip(group.plan.ranks, group.engines, strict=True):
        assert rank.memory["scratch"] / 6 < engine.ops.scratch_peak <= rank.memory["scratch"]


@pytest.mark.parametrize("parts", [[5.0, 1.0], [1.0, 9.0, 1.0]])
def test_uneven_parts(
    mini: Path, engine_for: Make, ranks_for: Make, drive: Make, parts: list[float]
) -> None:
    """A rank may have no head at all, or most of everything."""
    path = mini / "gemma3/model-f16.gguf"
    group = ranks_for(
        path, "cpu", ranks=len(parts), split_mode="tensor", tensor_split=parts, threads=len(parts)
    )
    heads = [rank.share.heads[1] - rank.share.heads[0] for rank in group.plan.ranks]
    assert sum(heads) == 6
    assert len(set(heads)) > 1
    ids = np.asarray(IDS, np.int32)
    alone = engine_for(path, "cpu")
    expected = np.concatenate(list(alone.prompt_logits(ids)))
    found = np.concatenate(list(group.prompt_logits(ids)))
    assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()
    assert drive(group).generate(IDS, 12) == drive(alone).generate(IDS, 12)


@pytest.mark.model
@pytest.mark.parametrize("ranks", [2, 3])
def test_smollm2(data: Path, smollm2: Path, ranks_for: Make, drive: Make, ranks: int) -> None:
    """Nine heads over two ranks: the tokens of other engines on the exact weights."""
    group = ranks_for(smollm2, "cpu", ranks=ranks)
    for stored in json.loads((data / "smollm2.json").read_text())[:3]:
        assert drive(group).generate(stored["ids"], 64) == stored["greedy"]
