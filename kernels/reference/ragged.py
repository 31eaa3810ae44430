"""A step's tokens by the slots that they belong to, and pages by position."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np


def rows_of(slots: np.ndarray) -> Iterator[tuple[int, int]]:
    """The runs of neighbouring tokens that belong to one slot."""
    borders = np.flatnonzero(np.diff(slots)) + 1
    return itertools.pairwise([0, *borders.tolist(), len(slots)])
