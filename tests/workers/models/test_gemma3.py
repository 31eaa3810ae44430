"""gemma3: a window that prompts and answers cross, in pages that come round again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.workers.protocol import Row, Sampling, Step, Want

Make = Callable[..., Any]
TIE = 1e-3  # two logits this close may change places
LONG = np.random.default_rng(5).integers(0, 640, 400).tolist()


class Gateway:
    """Plays the gateway for one slot: gives each group its pages as late, and takes them back as
    early, as the Plan's contract allows; what is given back is overwritten with NaN at once."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.groups = engine, engine.plan.caches
        self.free = [list(range(1, group.pages)) for group in self.groups]
        self.held: list[dict[int, int]] = [{} for _ in self.groups]  # page number -> page
        self.most = [0 for _ in self.groups]
        self.begun = [0 for _ in self.groups]  # page numbers below are in the table

    def pages(self, start: int, end: int) -> list[list[int]]:
        """For a row that computes positions start to end - 1."""
        new: list[list[int]] = []
        for number, group in enumerate(self.groups):
            first, last = group.first_page(start), (end - 1) // group.page_tokens
            held = self.held[number]
            for dead in [page for page in held if page < first]:
                self.poison(number, held[dead])
                self.free[number].append(held.pop(dead))
            new.append([self.free[number].pop(0) for _ in range(self.begun[number], last + 1)])
            held.update(enumerate(new[-1], self.begun[number]))
            self.begun[number] = last + 1
            self.most[number] = max(self.most[number], len(held))
        return new

    def poison(self, number: int, page: int) -> None:
        for layer in self.engine.caches.layers:
            if layer.group == number:
                for array in (layer.kv.keys, layer.kv.values):
                    array[page] = 255 if array.dtype == np.uint8 else np.nan

    def generate(self, prompt: Sequence[int], count: int, chunk: int) -> list[tuple[int, float]]:
        """The tokens and their log-probabilities."""
        found: list[tuple[int, float]] = []
        for start in range(0, len(prompt), chunk):
            part = np.asarray(prompt[start : start + chunk], np.int32)
            end = start + len(part)
            row = Row(slot=0, start=start, tokens=part, pages=self.pages(start, end))
            row.sample = end == len(prompt)
            if start == 0:
                row.sampling, row.want = Sampling(), Want(logprobs=0)
            found += self.step(row)
        for start in range(len(prompt), len(prompt) + count - 1):
            found += self.step(Row(slot=0, start=start, pages=self.pages(start, start + 1)))
        self.step(release=[0])
        return found

    def step(self, *rows: Row, release: Sequence[int] = ()) -> list[tuple[int, float]]:
        answers = self.engine.run(Step(id=0, rows=list(rows), release=list(release))).rows
        return [pair for answer in answers for pair in answer.logprobs[0]]


@pytest.fixture
def model(mini: Path) -> Path:
    return mini / "gemma3/model-f16.gguf"


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_pages_come_round_again(mini: Path, engine_for: Make, model: Path, backend: str) -> None:
    engine = engine_for(model, backend, slots=1, batch_tokens=64)
    gateway = Gateway(engine)
    prompt = json.loads((mini / "gemma3/golden.json").read_text())["prompts"]["p200"]
    expected = np.load(mini / "gemma3/golden.npz")["p200.greedy"].tolist()
    found = gateway.generate(prompt, len(expected), chunk=64)
    assert [token for token, _ in found] == expected
    assert gateway.most == [4, 2]  # all 216 positions; a window of 24 and a chunk
    assert gateway.free[1] != sorted(gateway.free[1])  # one has been given back


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_decode_past_the_window(engine_for: Make, model: Path, backend: str) -> None:
    """Each chosen token is the best one when all is computed at once."""
    engine = engine_for(model, backend, slots=1, batch_tokens=64)
    gateway = Gateway(engine)
    found = gateway.generate(LONG[:5], 150, chunk=64)
    tokens = [token for token, _ in found]
    assert gateway.most == [3, 2]
    whole = np.asarray(LONG[:5] + tokens[:-1], np.int32)
    truth = engine_for(model, context=512)
    logits = np.concatenate(list(truth.prompt_logits(whole)))[4:]
    behind = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
    assert behind.max() <= TIE * np.abs(logits).max()


def test_chunks_and_reuse_change_no_bit(engine_for: Make, model: Path) -> None:
    """Chunks of 64 in reused pages give what one step with all pages gives, replayed or not."""
    small = engine_for(model, "cpu", slots=1, batch_tokens=64)
    large = engine_for(model, "cpu", slots=1, batch_tokens=512)
    expected = Gateway(large).generate(LONG, 40, chunk=512)
    assert Gateway(small).generate(LONG, 40, chunk=64) == expected
    assert small.graphs
    small.graphs = {}
    assert Gateway(small).generate(LONG, 40, chunk=64) == expected


def test_company_changes_nothing(engine_for: Make, model: Path, drive: Make) -> None:
    driver = drive(engine_for(model, "cpu"))
    prompts = [LONG[:30], LONG[30:130], LONG[130:135]]
    alone = [driver.generate(prompt, 20) for prompt in prompts]
    rows = [row for slot, prompt in enumerate(prompts) for row in driver.start(slot, prompt, 20)]
    together = [list(answer.tokens) for answer in driver.step(rows)]
    for _ in range(19):
        for mine, answer in zip(
            together, driver.step([Row(slot=s) for s in range(3)]), strict=True
        ):
            mine += answer.tokens
    assert together == alone


def test_a_reused_prefix_may_lack_what_is_behind_the_window(engine_for: Make, model: Path) -> None:
    """A slot that goes on from another's pages has page 0 where nothing is read."""
    engine = engine_for(model, "cpu", slots=2, batch_tokens=64)
    expected = Gateway(engine).generate(LONG[:200], 8, chunk=64)
    first, second = Gateway(engine), Gateway(engine)
    kept = 128
    first.generate(LONG[:kept], 1, chunk=64)
    pages = []
    for number, group in enumerate(engine.plan.caches):
        before = group.first_page(kept)
        held = [first.held[number].get(page, 0) for page in range(kept // group.page_tokens)]
        pages.append([0] * before + held[before:])
        second.free[number] = [p for p in second.free[number] if p not in pages[-1]]
    assert pages[1][0] == 0
    rows = []
    for start in (128, 192):
        tokens = np.asarray(LONG[start : min(start + 64, 200)], np.int32)
        rows.append(Row(slot=1, start=start, tokens=tokens, sample=start == 192))
    for number in range(2):
        pages[number] += [second.free[number].pop() for _ in range(2)]
    rows[0].pages, rows[0].sampling, rows[0].want = pages, Sampling(), Want(logprobs=0)
    found = [pair for row in rows for pair in second.step(row)]
    for start in range(200, 207):
        found += second.step(Row(slot=1, start=start))
    assert found == expected
