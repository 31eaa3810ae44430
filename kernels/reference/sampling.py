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
    Array,
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
        out.tokens[i], out.logprob_ids[i], out.logprobs[i] = -1, -1, 0
        if state.finished[slot] != RUNNING:
            out.finish[i] = DONE_BEFORE
            continue
        adjusted = adjust(logits[i], state, slot, position)
        if not (can_choose(logits[i]) and can_choose(adjusted)):
            out.finish[i] = state.finished[slot] = NOT_FINITE
            continue
        chosen = int(state.forced[slot])
        if chosen < 0:
            chosen = choose(adjusted, state, slot, position)
        out.tokens[i] = state.last_token[slot] = chosen
        if state.logprobs[slot] >= 0:
            ids = np.append(chosen, best(logits[i], int(state.logprobs[slot])))
            out.logprob_ids[i, : len(ids)] = ids
            out.logprobs[i, : len(ids)] = log_probabilities(logits[i], ids)
        state.next_position[slot] = position
        out.finish[i] = state.finished[slot] = _finish(chosen, position, state, slot)


def can_choose(logits: np.ndarray) -> bool:
    """Neither NaN nor +inf, and something that may be chosen."""
    return bool((logits < np.inf).all() and np.isfinite(logits.max()))


def adjust(logits: np.ndarray, state: SlotState, slot: int, position: int) -> np.ndarray:
    """With bias, penalties and mask, for the token of `position`."""
    x = logits.copy()
    count = state.bias_count[slot]
    x[state.bias_ids[slot, :count]] += state.bias_values[slot, :count]
    window = int(state.penalty_window[slot])
    first = max(0, position - window) if window else 0
    generated = max(first, int(state.prompt_tokens[slot]))
    held = _known(state.history[slot, first:position], len(x))
    repetition = state.repetition_penalty[slot]
    x[held] = np.where(x[held] > 0, x[held] / repetition, x[held] * repetition)
    ids, counts = np.unique(
        _known(state.history[slot, generated:position], len(x)), return_counts=True
    )
    frequency, presence = state.frequency_penalty[slot], state.presence_penalty[slot]
    x[ids] -= frequency * counts.astype(np.float32) + presence
    if state.masked[slot]:
        x[~allowed(state.mask[slot], len(x))] = -np.inf
    return x


def allowed(mask: np.ndarray, vocab: int) -> np.ndarray:
    """bool [vocab] of a mask's bits; tokens that it has no word for may not be chosen."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)[:vocab]
    return np.pad(bits, (0, vocab - len(bits)))


def _known(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Those that are tokens of the vocabulary, each as often as it stands there."""
    return tokens[(tokens >= 0) & (tokens < vocab)]


def choose(logits: np.ndarray, state: SlotState, slot: int, position: int) -> int:
    """The token for `position`, of adjusted logits."""
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


def best(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest logits, largest first, that are not -inf."""
    order = np.argsort(-logits, kind="stable")[:count]
    return order[logits[order] > -np.inf]


def log_probabilities(logits: np.ndarray, ids: np.ndarray) -> Array:
    """Of `ids` under the distribution of the logits as they are."""
    shifted = logits - logits.max()
    return shifted[ids] - np.log(np.exp(shifted).sum(dtype=np.float64))


def _finish(token: int, position: int, state: SlotState, slot: int) -> int:
    if token in state.stop_ids[slot]:
        return STOP
    return LENGTH if position + 1 >= state.max_position[slot] else RUNNING
