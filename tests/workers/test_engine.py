"""Engine: rows give what each would give alone, however they are cut, packed or replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.ops import MAX_STOP_IDS
from voltapile.topology.scratch import SCORES_BYTES
from voltapile.workers.protocol import Copy, Row, Sampling, Step, Want

Make = Callable[..., Any]
BACKENDS = ["reference", "cpu"]
SAMPLED = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 7}
PENALISED = {
    "temperature": 0.9,
    "seed": 11,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {5: 2.0, 9: -100.0},
}
WAYS = pytest.mark.parametrize(
    "sampling", [{}, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"]
)
rng = np.random.default_rng(3)
PROMPTS = [rng.integers(0, 650, size).tolist() for size in (70, 5, 133, 64)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(mini: Path, engine_for: Make, backend: str) -> Any:
    return engine_for(mini / "llama/model-f16.gguf", backend)


def alone(driver: Any, count: int, **sampling: Any) -> list[list[int]]:
    return [driver.generate(p, count, prompt_tokens=len(p), **sampling) for p in PROMPTS]


def together(driver: Any, count: int, slots: Sequence[int], **sampling: Any) -> list[list[int]]:
    """All prompts in one step, then all continue in one step each."""
    rows = []
    for slot, prompt in zip(slots, PROMPTS, strict=True):
        rows += driver.start(slot, prompt, count, prompt_tokens=len(prompt), **sampling)
    tokens = [list(answer.tokens) for answer in driver.step(rows)]
    for _ in range(count - 1):
        for mine, answer in zip(tokens, driver.step([Row(slot=s) for s in slots]), strict=True):
            mine += answer.tokens
    for slot in slots:
        driver.release(slot)
    return tokens


@WAYS
def test_company_changes_nothing(engine: Any, drive: Make, sampling: dict[str, Any]) -> None:
    driver = drive(engine)
    assert together(driver, 12, (2, 0, 3, 1), **sampling) == alone(driver, 12, **sampling)


def test_company_changes_no_bit(mini: Path, engine_for: Make, drive: Make) -> None:
    """Log-probabilities, too: bit for bit, on the CPU backend."""
    engine = engine_for(mini / "llama/model-f16.gguf", "cpu")

    def logprobs(slots: Sequence[int]) -> list[list[tuple[int, float]]]:
        driver = drive(engine)
        found: list[list[tuple[int, float]]] = [[] for _ in slots]
        rows = []
        for slot in slots:
            first = driver.start(slot, PROMPTS[slot], 8)
            first[0].want = Want(logprobs=0)
            rows += first
        for mine, answer in zip(found, driver.step(rows), strict=True):
            mine += answer.logprobs[0]
        for _ in range(7):
            answers = driver.step([Row(slot=slot) for slot in slots])
            for mine, answer in zip(found, answers, strict=True):
                mine += answer.logprobs[0]
        for slot in slots:
            driver.release(slot)
        return found

    assert logprobs([0, 1, 2, 3]) == [logprobs([slot])[0] for slot in range(4)]


@pytest.mark.parametrize("chunk", [64, 128])
def test_chunks_change_nothing(engine: Any, drive: Make, chunk: int) -> None:
    driver = drive(engine)
    for prompt in PROMPTS:
        for sampling in ({}, PENALISED):
            whole = driver.generate(prompt, 8, **sampling)
            assert driver.generate(prompt, 8, chunk=chunk, **sampling) == whole


def test_pages_in_any_order(engine: Any, drive: Make) -> None:
    driver = drive(engine)
    before = alone(driver, 40)
    for free in driver.free:
        rng.shuffle(free)
    assert alone(driver, 40) == before


def test_pages_may_come_late(engine: Any, drive: Make) -> None:
    """A table grows while its request decodes."""
    driver = drive(engine)
    expected = driver.generate(PROMPTS[0], 40)
    tokens = driver.step(driver.start(0, PROMPTS[0], 1))[0].tokens
    page_tokens = engine.plan.caches[0].page_tokens
    held = -(-(len(PROMPTS[0]) + 1) // page_tokens)
    for position in range(len(PROMPTS[0]), len(PROMPTS[0]) + 39):
        pages = [[driver.free[0].pop()]] if position // page_tokens >= held else []
        held += len(pages)
        tokens += driver.step([Row(slot=0, pages=pages)])[0].tokens
    assert tokens == expected


def test_replay_equals_eager(mini: Path, engine_for: Make, drive: Make) -> None:
    recorded = engine_for(mini / "llama/model-f16.gguf", "cpu")
    if not recorded.graphs:
        pytest.skip("this backend does not record")
    eager = engine_for(mini / "llama/model-f16.gguf", "cpu")
    eager.graphs = {}
    for sampling in ({}, SAMPLED, PENALISED):
        expected = alone(drive(eager), 12, **sampling)
        assert alone(drive(recorded), 12, **sampling) == expected
        assert together(drive(recorded), 12, (0, 1, 2, 3), **sampling) == expected


def test_a_recorded_chunk_equals_an_eager_one(mini: Path, engine_for: Make, drive: Make) -> None:
    """A prompt that fills steps, alone or with another one, in the middle of a page or not."""
    options = {"batch_tokens": 64, "context": 256}
    recorded = engine_for(mini / "gemma3/model-f16.gguf", "cpu", **options)
    eager = engine_for(mini / "gemma3/model-f16.gguf", "cpu", **options)
    assert not eager.chunks
    recorded.record_chunks()
    used: list[int] = []
    for outputs, graph in recorded.chunks.items():
        recorded.chunks[outputs] = Counted(graph, used, outputs)
    prompt = PROMPTS[2][:128]
    for chunk in (64, 32):
        expected = drive(eager).generate(prompt, 6, chunk=chunk)
        assert drive(recorded).generate(prompt, 6, chunk=64) == expected
    assert used == [0, 1] * 2
    driver = drive(recorded)
    rows = driver.start(0, prompt[:40], 6) + driver.start(1, prompt[40:64], 6)
    rows[0].sample = False
    answers = driver.step(rows)
    assert used[4:] == [1]
    assert answers[0].tokens == drive(eager).generate(prompt[40:64], 1)


class Counted:
    """A recorded step that notes its use."""

    def __init__(self, graph: Any, used: list[int], name: int) -> None:
        self.graph, self.used, self.name = graph, used, name

    def replay(self) -> None:
        self.used.append(self.name)
        self.graph.replay()


def test_decode_and_prefill_in_one_step(engine: Any, drive: Make) -> None:
    driver = drive(engine)
    expected = alone(driver, 6)
    tokens: list[list[int]] = [list(driver.step(driver.start(0, PROMPTS[0], 6))[0].tokens), []]
    for row in driver.start(1, PROMPTS[2], 6, chunk=64):
        answers = driver.step([Row(slot=0), row])
        for answer in answers:
            tokens[answer.slot] += answer.tokens
    assert tokens[0] == expected[0][:4]
    assert tokens[1] == expected[2][:1]


def test_stop_ids_end_a_request(engine: Any, drive: Make) -> None:
    driver = drive(engine)
    free_run = driver.generate(PROMPTS[0], 12)
    stop = free_run[5]
    first = free_run.index(stop)
    answers = driver.step(driver.start(0, PROMPTS[0], 12, stop_ids=[1, stop]))
    for _ in range(11):
        answers += driver.step([Row(slot=0)])
    assert [a.tokens for a in answers[: first + 1]] == [[t] for t in free_run[: first + 1]]
    assert [a.finish for a in answers[: first + 1]] == [""] * first + ["stop"]
    assert all(a.tokens == [] and a.finish == "" for a in answers[first + 1 :])


def test_the_limit_ends_a_request(engine: Any, drive: Make) -> None:
    """max_position = prompt + 3: three tokens, the third with finish "length"."""
    driver = drive(engine)
    prompt = PROMPTS[1]
    answers = driver.step(driver.start(0, prompt, 12, max_position=len(prompt) + 3))
    for _ in range(4):
        answers += driver.step([Row(slot=0)])
    assert [len(a.tokens) for a in answers] == [1, 1, 1, 0, 0]
    assert [a.finish for a in answers] == ["", "", "length", "", ""]


def test_a_slot_starts_anew(engine: Any, drive: Make) -> None:
    """Release, and a new request in the same slot and pages, in one step."""
    driver = drive(engine)
    expected = driver.generate(PROMPTS[1], 4)
    driver.step(driver.start(0, PROMPTS[0], 20, stop_ids=[3]))
    for free, pages in zip(driver.free, driver.held.pop(0), strict=True):
        free.extend(pages)
    tokens = list(driver.step(driver.start(0, PROMPTS[1], 4), release=[0])[0].tokens)
    for _ in range(3):
        tokens += driver.step([Row(slot=0)])[0].tokens
    assert tokens == expected


def test_copied_pages_hold_the_same(engine: Any, drive: Make) -> None:
    driver = drive(engine)
    expected = driver.generate(PROMPTS[0], 4)
    row = driver.start(0, PROMPTS[0], 4)[0]
    tokens = list(driver.step([row])[0].tokens)
    old = driver.held[0][0]
    new = [driver.free[0].pop() for _ in old]
    copies = [Copy(kind="page", source=a, target=b) for a, b in zip(old, new, strict=True)]
    # The next row finds its prefix in the copies; the originals are overwritten by another.
    engine.run(Step(id=90, copy=copies, release=[0]))
    driver.free[0].extend(old)
    driver.step(driver.start(1, PROMPTS[2], 4))
    history = [*PROMPTS[0], *tokens]
    row = Row(slot=0, start=len(PROMPTS[0]), pages=[new], sampling=Sampling())
    row.tokens = np.asarray(history[-1:], np.int32)
    tokens += driver.step([row])[0].tokens
    for _ in range(2):
        tokens += driver.step([Row(slot=0)])[0].tokens
    assert tokens == expected


def test_sampling_follows_seed_and_position_alone(engine: Any, drive: Make) -> None:
    driver = drive(engine)
    first = driver.generate(PROMPTS[0], 24, temperature=1.0, seed=2**64 - 1)
    assert driver.generate(PROMPTS[0], 24, slot=3, temperature=1.0, seed=2**64 - 1) == first
    assert driver.generate(PROMPTS[0], 24, temperature=1.0, seed=5) != first
    # A request that comes back after a crash draws the numbers that it would have had.
    resumed = driver.generate([*PROMPTS[0], *first[:10]], 14, temperature=1.0, seed=2**64 - 1)
    assert resumed == first[10:]


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_survive_a_restart(
    engine: Any, drive: Make, temperature: float, window: int
) -> None:
    """All known tokens come again, in chunks and in a slot that somebody else has used."""
    driver, prompt = drive(engine), PROMPTS[0]
    sampling = PENALISED | {"temperature": temperature, "penalty_window": window}
    sampling["prompt_tokens"] = len(prompt)
    first = driver.generate(prompt, 24, **sampling)
    driver.generate(PROMPTS[2], 5, slot=2)
    assert 9 not in first
    for known in (1, 10, 23):
        again = driver.generate([*prompt, *first[:known]], 24 - known, 2, 64, **sampling)
        assert again == first[known:]


def test_penalties_do_what_they_say(engine: Any, drive: Make) -> None:
    """Greedy with penalties is the argmax of the penalised logits, found by hand."""
    driver, prompt = drive(engine), PROMPTS[1]
    sampling = PENALISED | {"temperature": 0.0, "prompt_tokens": len(prompt)}
    sampling |= {"repetition_penalty": 0.5, "frequency_penalty": 2.0}  # the prompt's, once each
    tokens = driver.generate(prompt, 12, **sampling)
    assert tokens != driver.generate(prompt, 12)
    known = np.array(prompt + tokens, np.int32)
    logits = np.concatenate(list(engine.prompt_logits(known)))
    for n, token in enumerate(tokens):
        x = logits[len(prompt) + n - 1].astype(np.float64)
        x[5] += 2.0
        x[9] -= 100.0
        for seen in set(prompt + tokens[:n]):
            x[seen] = x[seen] / 0.5 if x[seen] > 0 else x[seen] * 0.5
        for seen in set(tokens[:n]):
            x[seen] -= 0.4 + 2.0 * tokens[:n].count(seen)
        assert x[token] >= x.max() - 1e-3


def test_a_reused_prefix_counts(engine: Any, drive: Make) -> None:
    """Its pages were computed for somebody else: the row's history says what they hold."""
    driver, prompt = drive(engine), PROMPTS[2]
    sampling = {"repetition_penalty": 0.5, "prompt_tokens": len(prompt)}
    expected = driver.generate(prompt, 8, **sampling)
    assert expected != driver.generate(prompt, 8)
    driver.step(driver.start(0, prompt[:128], 0))
    shared = [pages[:2] for pages in driver.held[0]]
    row = driver.start(1, prompt, 8, **sampling)[0]
    own = [pages[2:] for pages in driver.held[1]]
    row.pages = [a + b for a, b in zip(shared, own, strict=True)]
    row.history, row.start = np.array(prompt[:128], np.int32), 128
    row.tokens = row.tokens[128:]
    tokens = list(driver.step([row])[0].tokens)
    for _ in range(7):
        tokens += driver.step([Row(slot=1)])[0].tokens
    assert tokens == expected


def test_logprobs_of_the_chosen_token(engine: Any, drive: Make) -> None:
    driver = drive(engine)
    row = driver.start(0, PROMPTS[1], 2)[0]
    row.want = Want(logprobs=0)
    answer = driver.step([row])[0]
    driver.release(0)
    logits = np.concatenate(list(engine.prompt_logits(np.asarray(PROMPTS[1], np.int32))))[-1]
    expected = logits.max() - np.log(np.exp(logits.astype(np.float64)).sum())
    [[(token, value)]] = answer.logprobs
    assert token == int(logits.argmax()) == answer.tokens[0]
    assert value == pytest.approx(expected, abs=1e-5)


def test_the_best_alternatives(engine: Any, drive: Make) -> None:
    """Of the model's own distribution, whatever the request does to it; for its row alone."""
    driver, prompt = drive(engine), PROMPTS[1]
    rows = []
    for slot, count in ((0, 20), (1, -1), (2, 3)):
        row = driver.start(slot, prompt, 4, **PENALISED)[0]
        row.want = Want(logprobs=count)
        rows.append(row)
    answers = [driver.step(rows), driver.step([Row(slot=slot) for slot in range(3)])]
    known = np.array([*prompt, *answers[0][0].tokens], np.int32)
    logits = np.concatenate(list(engine.prompt_logits(known)))
    for n, answer in enumerate(answers):
        x = logits[len(prompt) - 1 + n].astype(np.float64)
        x -= x.max() + np.log(np.exp(x - x.max()).sum())
        assert [len(a.logprobs) for a in answer] == [1, 0, 1]
        assert [len(a.logprobs[0]) for a in (answer[0], answer[2])] == [21, 4]
        assert answer[0].logprobs[0][:4] == answer[2].logprobs[0]
        for a in (answer[0], answer[2]):
            ids, values = zip(*a.logprobs[0], strict=True)
            assert ids[0] == a.tokens[0]
            assert sorted(values[1:], reverse=True) == list(values[1:])
            np.testing.assert_allclose(values, x[list(ids)], atol=2e-3)
            assert set(ids[1:4]) == set(np.argsort(-x)[:3].tolist())


@pytest.mark.parametrize("chunk", [0, 64])
def test_logprobs_of_a_prompt(engine: Any, drive: Make, chunk: int) -> None:
    """Whole or in chunks, beside another request, and once: with the first token."""
    driver, prompt = drive(engine), PROMPTS[2]
    expected = driver.generate(prompt, 4, prompt_tokens=len(prompt))
    other = list(driver.step(driver.start(1, PROMPTS[1], 9))[0].tokens)
    rows = driver.start(0, prompt, 4, chunk, prompt_tokens=len(prompt))
    rows[0].want = Want(prompt_logprobs=2)
    for row in rows:
        answers = {answer.slot: answer for answer in driver.step([Row(slot=1), row])}
        other += answers[1].tokens
    found, tokens = answers[0].prompt_logprobs, list(answers[0].tokens)
    for _ in range(3):
        mine, theirs = driver.step([Row(slot=0), Row(slot=1)])
        tokens += mine.tokens
        other += theirs.tokens
        assert not mine.prompt_logprobs
    driver.release(0)
    driver.release(1)
    assert tokens == expected
    assert other == driver.generate(PROMPTS[1], len(other))
    logits = np.concatenate(list(engine.prompt_logits(np.asarray(prompt, np.int32))))
    x = logits.astype(np.float64)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    assert len(found) == len(prompt)
    assert found[0] == []
    for position in range(1, len(prompt)):
        [(token, value), (best, high), (_, low)] = found[position]
        assert token == prompt[position]
        assert value == pytest.approx(x[position - 1, token], abs=1e-3)
        assert high == pytest.approx(x[position - 1].max(), abs=1e-3)
        assert best == x[position - 1].argmax()
        assert value <= high >= low


def test_a_bad_number_is_that_requests_error(engine: Any, drive: Make) -> None:
    """A NaN in the cache of one request ends it with a place; its neighbour goes on."""
    driver = drive(engine)
    expected = driver.generate(PROMPTS[1], 4, slot=1)
    driver.step(driver.start(0, PROMPTS[0], 4))
    tokens = list(driver.step(driver.start(1, PROMPTS[1], 4))[0].tokens)
    driver.poison(layer=2, slot=0)
    answers = driver.step([Row(slot=0), Row(slot=1)])
    assert answers[0].finish == "error"
    assert answers[0].tokens == []
    assert answers[0].error == "rank 0: non-finite logits (in layer 2)"
    tokens += answers[1].tokens
    answers = driver.step([Row(slot=0), Row(slot=1)])
    assert answers[0].tokens == []
    tokens += answers[1].tokens
    assert tokens == expected[:3]


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_step_may_be_submitted_ahead(engine: Any, drive: Make, is_taken: bool) -> None:
    """What a Result tells was settled when its Step was submitted; a slot that somebody else has
    by then is left alone."""
    driver = drive(engine)
    engine.run(Step(id=1, rows=driver.start(0, PROMPTS[0], 8)))
    want = Want(logprobs=2, prompt_logprobs=0)
    rows = driver.start(1, PROMPTS[1], 8, prompt_tokens=len(PROMPTS[1]))
    rows[0].want = want
    steps = [Step(id=2, rows=[Row(slot=0), *rows])]
    steps += [Step(id=3, rows=[Row(slot=0), Row(slot=1)])]
    first = engine.submit(steps[0])
    driver.poison(layer=2, slot=0)
    second = engine.submit(steps[1])
    last = Step(id=4)
    if is_taken:
        last = Step(id=4, release=[0, 1], rows=driver.start(0, PROMPTS[1], 4))
    third = engine.submit(last)
    one, two, three = map(engine.collect, (first, second, third))
    assert [one.id, two.id, three.id] == [2, 3, 4]
    assert len(one.rows[1].logprobs[0]) == 3
    assert len(one.rows[1].prompt_logprobs) == len(PROMPTS[1])
    assert one.rows[0].finish == ""
    assert two.rows[0].finish == "error"
    place = "" if is_taken else " (in layer 2)"
    assert two.rows[0].error == f"rank 0: non-finite logits{place}"
    assert two.rows[1].prompt_logprobs == []
    assert len(two.rows[1].logprobs[0]) == 3
    assert [answer.finish for answer in three.rows] == [""] * is_taken


def test_ahead_gives_the_same(engine: Any, drive: Make) -> None:
    driver = drive(engine)
    expected = driver.generate(PROMPTS[0], 6)
    steps = [Step(id=0, rows=driver.start(0, PROMPTS[0], 6))]
    steps += [Step(id=i, rows=[Row(slot=0)]) for i in range(1, 6)]
    found, pending = [], [engine.submit(steps[0])]
    for step in steps[1:]:
        pending.append(engine.submit(step))
        found += engine.collect(pending.pop(0)).rows[0].tokens
    found += engine.collect(pending.pop()).rows[0].tokens
    assert found == expected


def test_a_step_without_rows(engine: Any) -> None:
    assert engine.run(Step(id=1, release=[0, 1])).rows == []


def test_the_most_stop_ids(engine: Any, drive: Make) -> None:
    driver = drive(engine)
    expected = driver.generate(PROMPTS[1], 3)
    most = [600 + i for i in range(MAX_STOP_IDS - 1)]
    answers = driver.step(driver.start(0, PROMPTS[1], 3, stop_ids=[*most, expected[0]]))
    assert answers[0].finish == "stop"


def test_steps_allocate_nothing(mini: Path, engine_for: Make, drive: Make) -> None:
    """A thousand replays do not make the process grow."""
    driver = drive(engine_for(mini / "llama/model-f16.gguf", "cpu", context=2048))

    def resident() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) << 10

    driver.generate(PROMPTS[0], 1100)  # touches the cache's pages
    before = resident()
    driver.generate(PROMPTS[0], 1100)
    assert resident() - before < 1 << 19


@pytest.mark.parametrize("context", [256, 4096])
def test_memory_is_as_planned(
    mini: Path, engine_for: Make, drive: Make, monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    """What the CPU backend allocates is what the Plan says: KV, slots and the batch, scratch."""
    from voltapile.kernels.cpu.ops import CpuOps

    sizes = {"kv": 0, "arrays": 0}
    zeros, kv_cache = CpuOps.zeros, CpuOps.kv_cache

    def counted_zeros(ops: Any, shape: Any, dtype: Any) -> Any:
        array = zeros(ops, shape, dtype)
        sizes["arrays"] += array.nbytes
        return array

    def counted_cache(ops: Any, *arguments: Any) -> Any:
        cache = kv_cache(ops, *arguments)
        sizes["kv"] += cache.keys.nbytes + cache.values.nbytes
        return cache

    monkeypatch.setattr(CpuOps, "zeros", counted_zeros)
    monkeypatch.setattr(CpuOps, "kv_cache", counted_cache)
    engine = engine_for(mini / "llama/model-f16.gguf", "cpu", context=context)
    host = engine.buffer.host.nbytes + sum(t.nbytes for t in engine.caches.tables)
    planned = engine.plan.ranks[0].memory
    assert sizes["kv"] == pytest.approx(planned["kv"], rel=0.02)
    assert sizes["arrays"] + host <= planned["slots"]
    total = sizes["kv"] + sizes["arrays"] + host + planned["scratch"]
    assert total == pytest.approx(sum(planned.values()) - planned["reserve"], rel=0.02)


@pytest.mark.parametrize(
    "model",
    [
        *("llama", "qwen2", "qwen3", "gemma3"),
        *("qwen3moe", "qwen35", "qwen35moe", "qwen3next", "qwen4exp"),
    ],
)
def test_scratch_is_enough(mini: Path, engine_for: Make, drive: Make, model: str) -> None:
    """The largest prompt step, all slots at once, and prompt probabilities stay below the plan."""
    engine = engine_for(mini / model / "model-f16.gguf", "cpu", context=1024)
    driver = drive(engine)
    prompts = [rng.integers(0, 650, engine.plan.batch_tokens // 4).tolist() for _ in range(4)]
    rows = [row for slot in range(4) for row in driver.start(slot, prompts[slot], 8)]
    assert all(answer.tokens for answer in driver.step(rows))
    driver.step([Row(slot=slot) for slot in range(4)])
    for slot in range(4):
        driver.release(slot)
    long = rng.integers(0, 650, 1000).astype(np.int32)
    assert sum(len(piece) for piece in engine.prompt_logits(long)) == 1000
    peak, planned = engine.ops.scratch_peak, engine.plan.ranks[0].memory["scratch"]
    fixed = SCORES_BYTES if model == "qwen4exp" else 0  # for a context that is longer than this one
    assert (planned - fixed) / 4 < peak <= planned - fixed
