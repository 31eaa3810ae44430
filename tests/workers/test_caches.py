"""Page tables and slots: what is appended, and what a release leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.ops import (
    DONE_BEFORE,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    RUNNING,
)
from voltapile.kernels.reference.ops import ReferenceOps
from voltapile.workers import protocol
from voltapile.workers.caches import TRASH_PAGE, Caches
from voltapile.workers.protocol import Copy, Sampling, Want

Make = Callable[..., Any]


@pytest.fixture
def caches(mini: Path, plan_for: Make) -> Caches:
    plan = plan_for(mini / "llama/model-f16.gguf", context=256, slots=2)
    return Caches(plan, ReferenceOps(), plan.ranks[0].share)


def test_tables_grow_and_are_forgotten(caches: Caches) -> None:
    caches.append(1, [[5]])
    caches.append(1, [[3, 2]])
    assert caches.pages[0][1].tolist() == [5, 3, 2, TRASH_PAGE]
    assert not caches.pages[0][0].any()
    caches.release(1)
    assert not caches.pages[0][1].any()
    caches.append(1, [[4]])
    assert caches.pages[0][1, 0] == 4


def test_more_pages_than_a_context_are_our_mistake(caches: Caches) -> None:
    with pytest.raises(AssertionError, match="too many pages"):
        caches.append(0, [[1, 2, 3, 4, 5]])


def test_a_request_begins(caches: Caches) -> None:
    state = caches.state
    assert state.finished.tolist() == [DONE_BEFORE] * 3
    sampling = Sampling(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=-1, stop_ids=[7, 8], max_position=9
    )
    caches.begin_request(1, sampling)
    assert state.finished.tolist() == [DONE_BEFORE, RUNNING, DONE_BEFORE]
    assert state.stop_ids[1].tolist() == [7, 8] + [-1] * (MAX_STOP_IDS - 2)
    fields = (state.temperature, state.top_k, state.top_p, state.min_p, state.max_position)
    assert [float(array[1]) for array in fields] == [0.5, 3, 0.25, 0.125, 9]
    assert int(state.seed[1]) == 2**64 - 1
    off = (state.repetition_penalty, state.presence_penalty, state.frequency_penalty)
    assert [float(array[1]) for array in off] == [1.0, 0.0, 0.0]
    assert (state.bias_count[1], state.penalty_window[1], state.logprobs[1]) == (0, 0, -1)


def test_a_request_with_everything(caches: Caches) -> None:
    state = caches.state
    sampling = Sampling(
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        penalty_window=64,
        prompt_tokens=12,
        logit_bias={7: -100.0, 3: 0.5},
    )
    caches.begin_request(0, sampling, Want(logprobs=20))
    fields = (state.repetition_penalty, state.presence_penalty, state.frequency_penalty)
    assert [float(array[0]) for array in fields] == [1.5, 0.25, -0.5]
    fields = (state.penalty_window, state.prompt_tokens, state.bias_count, state.logprobs)
    assert [int(array[0]) for array in fields] == [64, 12, 2, 20]
    assert state.bias_ids[0, :2].tolist() == [7, 3]
    assert state.bias_values[0, :2].tolist() == [-100.0, 0.5]
    caches.begin_request(0, Sampling())
    assert (state.bias_count[0], state.logprobs[0]) == (0, -1)


def test_history_is_remembered(caches: Caches) -> None:
    caches.remember(1, np.array([4, 5, 6], np.int32))
    assert caches.state.history[1, :4].tolist() == [4, 5, 6, 0]
    assert not caches.state.history[0].any()


def test_more_than_a_slot_holds_is_our_mistake(caches: Caches) -> None:
    caches.begin_request(0, Sampling(logit_bias=dict.fromkeys(range(1024), 1.0)))
    with pytest.raises(AssertionError, match="biased"):
        caches.begin_request(0, Sampling(logit_bias=dict.fromkeys(range(1025), 1.0)))
    with pytest.raises(AssertionError, match="alternatives"):
        caches.begin_request(0, Sampling(), Want(logprobs=21))


def test_the_wire_and_the_device_agree_on_limits(caches: Caches) -> None:
    ours = (protocol.MAX_STOP_IDS, protocol.MAX_LOGIT_BIAS, protocol.MAX_LOGPROBS)
    assert ours == (MAX_STOP_IDS, MAX_LOGIT_BIAS, MAX_LOGPROBS)
    with pytest.raises(AssertionError, match="stop ids"):
        caches.begin_request(0, Sampling(stop_ids=list(range(MAX_STOP_IDS + 1))))


def test_a_page_is_copied_in_all_layers(caches: Caches) -> None:
    for number, layer in enumerate(caches.layers):
        layer.kv.keys[2] = number + 1
    caches.copy(Copy(kind="page", source=2, target=3))
    for number, layer in enumerate(caches.layers):
        assert (layer.kv.keys[3] == number + 1).all()
