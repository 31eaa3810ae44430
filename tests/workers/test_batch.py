"""Rows become columns of one packed array, each Batch a set of views of it."""

from __future__ import annotations

import numpy as np
import pytest
from voltapile.kernels.reference.ops import ReferenceOps
from voltapile.workers.batch import BatchBuffer
from voltapile.workers.protocol import Row


@pytest.fixture
def buffer() -> BatchBuffer:
    return BatchBuffer(ReferenceOps(), 12, (np.zeros((4, 2), np.int32),))


def test_a_ragged_step(buffer: BatchBuffer) -> None:
    rows = [
        Row(slot=2, start=5, tokens=np.array([7, 8, 9], np.int32), sample=False),
        Row(slot=0),
        Row(slot=1, start=0, tokens=np.array([4], np.int32)),
    ]
    batch = buffer.fill(rows)
    assert batch.tokens.tolist() == [7, 8, 9, 0, 4]
    assert batch.slots.tolist() == [2, 2, 2, 0, 1]
    assert batch.positions.tolist() == batch.rope_positions.tolist() == [5, 6, 7, 0, 0]
    assert batch.continues.tolist() == [0, 0, 0, 1, 0]
    assert batch.outputs.tolist() == [3, 4]


def test_padding_rows_continue_the_padding_slot(buffer: BatchBuffer) -> None:
    batch = buffer.fill([Row(slot=1)], 3, 3)
    assert batch.slots.tolist() == [1, 3, 3, 3]
    assert batch.continues.tolist() == [1, 1, 1, 1]
    assert batch.outputs.tolist() == [0, 1, 2, 3]


def test_a_size_has_its_place(buffer: BatchBuffer) -> None:
    """A recorded step reads at the same addresses each time."""
    first = buffer.views(3, 3)
    buffer.fill([Row(slot=s) for s in range(3)])
    assert first.slots.tolist() == [0, 1, 2]
    assert first.outputs.tolist() == [0, 1, 2]


def test_rope_positions_apart_from_the_cache(buffer: BatchBuffer) -> None:
    row = Row(slot=0, start=3, tokens=np.array([1, 1], np.int32))
    row.rope_positions = np.array([[9, 9]], np.int32)
    batch = buffer.fill([row])
    assert batch.positions.tolist() == [3, 4]
    assert batch.rope_positions.tolist() == [9, 9]


def test_more_than_planned_is_our_mistake(buffer: BatchBuffer) -> None:
    with pytest.raises(AssertionError, match="13 tokens in a step, 12 planned"):
        buffer.fill([Row(slot=0, tokens=np.zeros(13, np.int32))])


def test_rows_that_go_on_are_sent_once(
    buffer: BatchBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `begin` has written stays; anything else in between is sent, and then they are again."""
    sent: list[int] = []
    upload = buffer.ops.upload
    monkeypatch.setattr(
        buffer.ops,
        "upload",
        lambda target, values: (sent.append(values.size), upload(target, values)),
    )
    going = [Row(slot=1, start=7), Row(slot=3, start=9)]
    first = buffer.fill(going)
    first.tokens[:], first.positions[:] = 5, 6
    assert buffer.fill(going) is first
    assert buffer.fill([Row(slot=1, start=8), Row(slot=3, start=10)]) is first
    assert first.tokens.tolist() == [5, 5]
    assert len(sent) == 1
    others: list[list[Row]] = [
        [Row(slot=3), Row(slot=1)],
        [Row(slot=1)],
        [Row(slot=1), Row(slot=3, sample=False)],
        [Row(slot=1), Row(slot=3, tokens=np.array([2], np.int32))],
    ]
    for count, rows in enumerate(others, 1):
        buffer.fill(rows)
        again = buffer.fill(going)
        assert again.slots.tolist() == [1, 3]
        assert again.continues.tolist() == [1, 1]
        assert again.outputs.tolist() == [0, 1]
        assert len(sent) == 1 + 2 * count
    buffer.fill(going, 1, 4)
    buffer.fill(going, 1, 4)
    buffer.fill_all_outputs(0, np.zeros(3, np.int32), 0)
    assert buffer.fill(going, 1, 4).slots.tolist() == [1, 3, 4]
    assert len(sent) == 12


def test_long_rows_are_counted(buffer: BatchBuffer) -> None:
    """A short row behind a long one counts it among what is generated, and yet it is long."""

    def row(slot: int, count: int) -> Row:
        return Row(slot=slot, tokens=np.zeros(count, np.int32))

    batch = buffer.fill([row(0, 9), row(1, 3)])
    assert (batch.generated, batch.long_rows) == (12, 1)
    assert buffer.fill([row(0, 8), row(1, 1)]).long_rows == 0
    assert buffer.fill([row(0, 11)]).long_rows == 1
    assert buffer.fill([Row(slot=1)], 3, 3).long_rows == 0
    assert buffer.fill_all_outputs(0, np.zeros(9, np.int32), 0).long_rows == 1
