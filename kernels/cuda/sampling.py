"""Launchers of the ends of a step: tokens that continue, and the choice of new ones.

The two structs that the kernel takes by value are packed here as csrc/sample.cu declares them.
"""

from __future__ import annotations

import numpy as np
from voltapile.kernels.cuda.launch import DeviceArray, Instance, Launcher
from voltapile.kernels.ops import MAX_STOP_IDS, Batch, SlotState, StepOutput

BEGIN = Instance("sample.cu", "begin_step")
SAMPLE = Instance("sample.cu", "sample_rows", (), True, waits=True)
BEST = Instance("sample.cu", "best_of_parts", (), True, waits=True)
TELL = Instance("tell.cu", "tell_host")
INSTANCES = [BEGIN, BEST, SAMPLE, TELL]

MOST_CONTEXT = 1 << 20  # the kernel counts a token's places in 20 bits
THREADS = 1024
PARTS = 128  # of a row of logits, most: about as many as there are multiprocessors
PART = 1024  # logits of a part, least
assert PARTS <= THREADS  # of the block that looks at all parts


def begin(ops: Launcher, batch: Batch, state: SlotState) -> None:
    count = len(batch.tokens)
    arrays = (
        batch.tokens,
        batch.slots,
        batch.positions,
        batch.rope_positions,
        batch.continues,
        state.last_token,
        state.next_position,
        state.history,
    )
    if count:
        ops.kernel(BEGIN)(
            (-(-count // 128),),
            128,
            (*(a.ptr for a in arrays), np.int32(count), np.int32(state.history.shape[1])),
        )


def tell(ops: Launcher, pinned: int, array: DeviceArray) -> None:
    """A copy to page-locked host memory, which is there when the kernel has ended."""
    assert array.nbytes % 4 == 0, array
    words = array.nbytes // 4
    ops.kernel(TELL)((-(-words // 256),), 256, (array.ptr, pinned, np.int32(words)))


def sample(
    ops: Launcher, logits: DeviceArray, batch: Batch, state: SlotState, out: StepOutput
) -> None:
    rows = len(batch.outputs)
    assert logits.ndim == 2, logits
    assert len(logits) == rows, (logits, rows)
    arrays = (out.tokens, out.finish, out.logprob_ids, out.logprobs)
    assert min(map(len, arrays)) >= rows, rows
    assert out.logprob_ids.shape == out.logprobs.shape, out.logprobs
    assert state.stop_ids.shape[1] == MAX_STOP_IDS, state.stop_ids
    assert state.history.shape[1] < MOST_CONTEXT, state.history
    if not rows:
        return
    vocab = logits.shape[1]
    parts = max(1, min(PARTS, vocab // PART))
    parts_best = ops.scratch((rows, parts), np.uint64)
    ops.kernel(BEST)((parts, rows), 256, (logits.ptr, parts_best.ptr, np.int32(vocab)))
    scratch = ops.scratch(logits.shape)
    ops.kernel(SAMPLE)(
        (rows,),
        THREADS,
        (
            logits.ptr,
            scratch.ptr,
            parts_best.ptr,
            batch.outputs.ptr,
            batch.slots.ptr,
            batch.positions.ptr,
            _state_struct(state),
            _output_struct(out),
            np.int32(vocab),
            np.int32(parts),
        ),
    )


def _state_struct(state: SlotState) -> np.ndarray:
    pointers = (
        state.last_token,
        state.next_position,
        state.finished,
        state.max_position,
        state.stop_ids,
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        state.seed,
        state.history,
        state.prompt_tokens,
        state.penalty_window,
        state.repetition_penalty,
        state.presence_penalty,
        state.frequency_penalty,
        state.bias_count,
        state.bias_ids,
        state.bias_values,
        state.logprobs,
        state.masked,
        state.forced,
        state.mask,
    )
    sizes = state.history.shape[1], state.bias_ids.shape[1], state.mask.shape[1]
    return _packed(pointers, sizes)


def _output_struct(out: StepOutput) -> np.ndarray:
    pointers = out.tokens, out.finish, out.logprob_ids, out.logprobs
    return _packed(pointers, (out.logprobs.shape[1],))


def _packed(pointers: tuple[DeviceArray, ...], numbers: tuple[int, ...]) -> np.ndarray:
    """One element: pointers, then int32 numbers, padded to 8 bytes as C++ does."""
    fields: list[tuple[str, type]] = [(f"p{i}", np.uint64) for i in range(len(pointers))]
    fields += [(f"n{i}", np.int32) for i in range(len(numbers) + len(numbers) % 2)]
    values = (*(array.ptr for array in pointers), *numbers, *([0] * (len(numbers) % 2)))
    return np.array([values], np.dtype(fields))
