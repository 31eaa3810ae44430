"""From the rows of a Step to the arrays of a Batch.

One packed array crosses to the device for each step, whatever its size; the Batch is made of
views of it, so that a recorded step of n tokens finds its arrays at the same place each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from voltapile.kernels.ops import Array, Batch, Ops
from voltapile.workers.protocol import Row

SHORT = 8  # a row of no more tokens counts as generated: one token, or drafts to verify
FIELDS = 5  # tokens, slots, positions, rope positions, continues; then the outputs


class BatchBuffer:
    """The device's packed array and its twin on the host."""

    def __init__(
        self, ops: Ops, max_tokens: int, pages: tuple[Array, ...], history: Array | None = None
    ) -> None:
        self.ops, self.max_tokens, self.pages, self.history = ops, max_tokens, pages, history
        self.device = ops.zeros(((FIELDS + 1) * max_tokens,), np.int32)
        self.host = np.zeros((FIELDS + 1) * max_tokens, np.int32)
        self._held: tuple[tuple[int, ...], Batch] | None = None  # what lies there, if it may stay

    def views(self, tokens: int, outputs: int, generated: int = 0, long_rows: int = -1) -> Batch:
        """The Batch of a step of that size, as the device sees it."""
        assert outputs <= tokens
        parts = [self.device[i * tokens : (i + 1) * tokens] for i in range(FIELDS)]
        return Batch(
            tokens=parts[0],
            slots=parts[1],
            positions=parts[2],
            rope_positions=parts[3],
            continues=parts[4],
            outputs=self.device[FIELDS * tokens : FIELDS * tokens + outputs],
            pages=self.pages,
            generated=generated,
            history=self.history,
            long_rows=long_rows,
        )

    def fill(self, rows: Sequence[Row], padding: int = 0, padding_slot: int = 0) -> Batch:
        """Upload `rows`, then `padding` rows that continue the padding slot.

        Of rows that all continue, `begin` writes whatever changes from step to step: the same ones
        again are there already."""
        key = _key(rows, padding, padding_slot)
        if self._held is not None and key == self._held[0]:
            return self._held[1]
        batch = self._fill(rows, padding, padding_slot)
        self._held = (key, batch) if key else None
        return batch

    def _fill(self, rows: Sequence[Row], padding: int, padding_slot: int) -> Batch:
        counts = [max(1, len(row.tokens)) for row in rows]
        size = sum(counts) + padding
        fields = self._fields(size)
        outputs = self.host[FIELDS * size :]
        end = sampled = generated = 0
        for row, count in zip(rows, counts, strict=True):
            _write(fields[:, end : end + count], row)
            end += count
            if count <= SHORT:
                generated = end  # and what comes before it, for safety
            if row.sample:
                outputs[sampled] = end - 1
                sampled += 1
        fields[:, end:] = [[0], [padding_slot], [0], [0], [1]]
        outputs[sampled : sampled + padding] = np.arange(end, size)
        sampled += padding
        long_rows = sum(count > SHORT for count in counts)
        batch = self.views(size, sampled, size if padding else generated, long_rows)
        self.ops.upload(self.device, self.host[: FIELDS * size + sampled])
        return batch

    def fill_all_outputs(self, slot: int, tokens: np.ndarray, start: int) -> Batch:
        """Upload one row with an output after each of its tokens (prompt probabilities)."""
        self._held = None
        size = len(tokens)
        _write(self._fields(size), Row(slot=slot, start=start, tokens=tokens))
        self.host[FIELDS * size : (FIELDS + 1) * size] = np.arange(size)
        batch = self.views(size, size, long_rows=int(size > SHORT))
        self.ops.upload(self.device, self.host[: (FIELDS + 1) * size])
        return batch

    def _fields(self, tokens: int) -> np.ndarray:
        """The host's array of a step of that size, one row for each field."""
        assert tokens <= self.max_tokens, f"{tokens} tokens in a step, {self.max_tokens} planned"
        return self.host[: FIELDS * tokens].reshape(FIELDS, tokens)


def _key(rows: Sequence[Row], padding: int, padding_slot: int) -> tuple[int, ...]:
    """Tells steps apart in which all rows continue and sample; () for any other."""
    if any(len(row.tokens) or not row.sample or row.rope_positions is not None for row in rows):
        return ()
    return padding, padding_slot, *(row.slot for row in rows)


def _write(fields: np.ndarray, row: Row) -> None:
    """Fill the columns of one row. A row without tokens continues."""
    tokens, slots, positions, rope_positions, continues = fields
    slots[:] = row.slot
    continues[:] = len(row.tokens) == 0
    tokens[:] = row.tokens if len(row.tokens) else 0
    positions[:] = np.arange(row.start, row.start + len(tokens))
    rope_positions[:] = positions if row.rope_positions is None else row.rope_positions[0]
