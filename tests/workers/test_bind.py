"""Rows with a mask or a forced token, eagerly and recorded; what binds one binds no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.workers.protocol import Row, Sampling, Step

PROMPT = [5, 17, 300, 41]


@pytest.fixture(params=["reference", "cpu"])
def engine(request: pytest.FixtureRequest, mini: Path, engine_for: Callable[..., Any]) -> Any:
    return engine_for(mini / "llama/model-f16.gguf", request.param)


def only(*tokens: int) -> np.ndarray:
    mask = np.zeros(21, np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


def first(slot: int, **bound: Any) -> Row:
    sampling = Sampling(max_position=60, prompt_tokens=len(PROMPT))
    tokens = np.array(PROMPT, np.int32)
    pages = [[2 * slot + 1, 2 * slot + 2]]
    return Row(slot=slot, tokens=tokens, pages=pages, sampling=sampling, **bound)


def run(engine: Any, number: int, *rows: Row, release: tuple[int, ...] = ()) -> list[int]:
    result = engine.run(Step(id=number, rows=list(rows), release=list(release)))
    return [row.tokens[0] for row in result.rows]


def test_each_row_is_bound_by_its_own(engine: Any) -> None:
    inner = getattr(engine, "engine", engine)
    free = run(inner, 0, first(0), first(1))
    assert free[0] == free[1]
    following = run(inner, 1, Row(slot=0), Row(slot=1))
    run(inner, 2, release=(0, 1))
    banned = free[0]
    bound = run(inner, 3, first(0, mask=only(3, 4)), first(1))
    assert bound[0] in (3, 4)
    assert bound[1] == banned
    assert run(inner, 4, Row(slot=0, mask=only(9)), Row(slot=1)) == [9, following[1]]
    assert run(inner, 5, Row(slot=0, forced=8), Row(slot=1, mask=only(11)))[0:2] == [8, 11]
    assert run(inner, 6, Row(slot=0, forced=7), Row(slot=1, forced=0)) == [7, 0]
    run(inner, 7, release=(0, 1))
    assert run(inner, 8, first(0), first(1)) == free
    run(inner, 9, release=(0, 1))
