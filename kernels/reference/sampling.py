"""The choice of tokens, in plain numpy: what kernels/random.md says, line by line.

Knows the arrays of a step and nothing of models.
"""

from __future__ import annotations

import numpy as np
from voltapile.kernels.ops import (
    DONE_BEFORE,
    LENGTH,
    NOT_FINITE,
    RUNNING,
    STOP,
    Batch,
    SlotState,
    StepOutput,
)

TOKEN = 0  # the purpose of a random number that chooses a token
_MASK = 2**64 - 1


def splitmix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int, purpose: int) -> float:
    """In [0, 1), exact in float32."""
    bits = splitmix(splitmix(splitmix(seed) ^ position) ^ purpose) >> 32
    return (bits >> 8) * 2.0**-24


def sample(logits: np.ndarray, batch: Batch, state: SlotState, out: StepOutput) -> None:
    """See Ops.sample."""
    for i, token in enumerate(batch.outputs):
        slot, position = int(batch.slots[token]), int(batch.positions[token]) + 1
        out.tokens[i], out.logprobs[i] = -1, 0
        if state.finished[slot] != RUNNING:
            out.finish[i] = DONE_BEFORE
        elif not np.isfinite(logits[i]).all():
            out.finish[i] = state.finished[slot] = NOT_FINITE
        else:
            chosen = choose(logits[i], state, slot, position)
            out.tokens[i] = state.last_token[slot] = chosen
            out.logprobs[i] = log_probability(logits[i], chosen)
            state.next_position[slot] = position
            out.finish[i] = state.finished[slot] = _finish(chosen, position, state, slot)


def choose(logits: np.ndarray, state: SlotState, slot: int, position: int) -> int:
    """The token for `position`."""
    temperature = state.temperature[slot]
    if temperature == 0:
        return int(np.argmax(logits))
    x = logits / temperature
    order = np.argsort(-x, kind="stable")  # equal ones by id
    if 0 < state.top_k[slot] < len(order):
        order = order[: state.top_k[slot]]
    p = np.exp(x[order] - x[order[0]]).astype(np.float64)
    p /= p.sum()
    keep = len(p)
    if state.top_p[slot] < 1:
        keep = min(keep, int(np.count_nonzero(np.cumsum(p) < state.top_p[slot])) + 1)
    if state.min_p[slot] > 0:
        keep = min(keep, max(1, int(np.count_nonzero(p >= state.min_p[slot] * p[0]))))
    cumulative = np.cumsum(p[:keep])
    number = uniform(int(state.seed[slot]), position, TOKEN)
    first = int(np.count_nonzero(cumulative / cumulative[-1] <= number))
    return int(order[min(first, keep - 1)])


def log_probability(logits: np.ndarray, token: int) -> float:
    """Of `token` under the distribution of the logits as they are."""
    shifted = logits - logits.max()
    return float(shifted[token] - np.log(np.exp(shifted).sum(dtype=np.float64)))


def _finish(token: int, position: int, state: SlotState, slot: int) -> int:
    if token in state.stop_ids[slot]:
        return STOP
    return LENGTH if position + 1 >= state.max_position[slot] else RUNNING
