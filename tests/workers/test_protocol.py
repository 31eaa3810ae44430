import threading

import numpy as np
import pytest
from voltapile.workers.protocol import (
    VERSION,
    ProtocolError,
    Ready,
    Result,
    Row,
    Sampled,
    Sampling,
    Step,
    Stop,
    Want,
    decode,
    encode,
)


def step(count=3):
    rows = [
        Row(
            slot=i,
            start=64 * i,
            tokens=np.arange(i, dtype=np.int32),
            pages=[[1, 2], [3]],
            embeds=np.full((i, 4), i, np.float32),
            sampling=Sampling(logit_bias={5: -np.inf}, stop_ids=[1], seed=2**64 - 1),
            want=Want(logprobs=3),
        )
        for i in range(count)
    ]
    return Step(id=7, rows=rows, release=[9])


def same(a, b):
    assert (a.id, a.release, len(a.rows)) == (b.id, b.release, len(b.rows))
    for x, y in zip(a.rows, b.rows, strict=True):
        np.testing.assert_array_equal(x.tokens, y.tokens)
        np.testing.assert_array_equal(x.embeds, y.embeds)
        assert y.tokens.dtype == np.int32
        assert (x.slot, x.start, x.pages, x.sampling, x.want) == (
            y.slot, y.start, y.pages, y.sampling, y.want)  # fmt: skip


def test_a_step_there_and_back():
    same(step(), decode([bytes(frame) for frame in encode(step())]))


def test_a_result_there_and_back():
    result = Result(id=1, rows=[Sampled(slot=2, tokens=[3], logprobs=[[(3, -0.5), (4, -1.0)]])])
    assert decode(encode(result)) == result


def test_arrays_are_neither_copied_nor_mixed_up_between_messages():
    frames = encode(step())
    first, second = decode(frames), decode(encode(step(5)))
    same(first, step())
    same(second, step(5))
    assert np.shares_memory(first.rows[2].embeds, np.frombuffer(frames[4], np.uint8))


def test_a_failure_leaves_nothing_behind():
    with pytest.raises(TypeError, match="cannot send"):
        encode(Step(id=1, rows=[Row(slot=0, tokens=object())]))
    with pytest.raises(ProtocolError):
        decode(encode(step())[:2])
    same(step(), decode(encode(step())))


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [bytes([VERSION + 1])], [bytes([VERSION])], [bytes([VERSION]) + b"\xc1"],
     [bytes([VERSION]) + b"\x91\xa4Nope"]],
)  # fmt: skip
def test_what_cannot_be_read(frames):
    with pytest.raises(ProtocolError):
        decode(frames)


def test_threads_have_coders_of_their_own():
    failures = []

    def work(count):
        try:
            for _ in range(200):
                same(step(count), decode(encode(step(count))))
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(count,)) for count in (1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_small_records():
    for message in (Ready(name="text-0", plan="p", instance=2**63 - 1), Stop(reason="x")):
        assert decode(encode(message)) == message


def test_a_decode_step_is_one_frame():
    frames = encode(Step(id=1, rows=[Row(slot=i) for i in range(8)]))
    assert len(frames) == 1
    assert [len(row.tokens) for row in decode(frames).rows] == [0] * 8
