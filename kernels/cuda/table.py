"""Every kernel instance: what CI compiles and measures, and what the loader may ask for.

Each launcher module lists its own; here they come together. Launchers import Instance from
launch.py, never from here.
"""

from __future__ import annotations

from voltapile.kernels.cuda.launch import Instance

__all__ = ["INSTANCES", "Instance"]


def _instances() -> list[Instance]:
    from voltapile.kernels.cuda import (
        attention,
        delta,
        dummy,
        experts,
        group,
        heads,
        matmul,
        mixes,
        plain,
        positions,
        rows,
        sampling,
        sparse,
        split,
        states,
        streams,
    )

    dense = rows, sampling, dummy, matmul, attention, heads, group
    modules = *dense, experts, delta, states, streams, mixes, plain, sparse, split, positions
    found = [instance for module in modules for instance in module.INSTANCES]
    assert len(set(found)) == len(found), "an instance is listed twice"
    return found


INSTANCES: list[Instance] = _instances()
