"""All of kernels/families.py in plain numpy."""

from __future__ import annotations

from voltapile.kernels.reference.delta import ReferenceDelta
from voltapile.kernels.reference.experts import ReferenceExperts
from voltapile.kernels.reference.positions import ReferencePositions
from voltapile.kernels.reference.sparse import ReferenceSparse
from voltapile.kernels.reference.states import ReferenceStates
from voltapile.kernels.reference.streams import ReferenceStreams


class ReferenceFamilyOps(
    ReferenceExperts,
    ReferenceDelta,
    ReferenceStreams,
    ReferenceSparse,
    ReferenceStates,
    ReferencePositions,
):
    pass
