"""Every kernel instance: what CI compiles and measures, and what the loader may ask for.

Each launcher module lists its own; here they come together. Launchers import Instance from
launch.py, never from here.
"""

from __future__ import annotations

from voltapile.kernels.cuda.launch import Instance

__all__ = ["INSTANCES", "Instance"]


def _instances() -> list[Instance]:
    from voltapile.kernels.cuda import rows, sampling

    found = [*rows.INSTANCES, *sampling.INSTANCES]
    assert len(set(found)) == len(found), "an instance is listed twice"
    return found


INSTANCES: list[Instance] = _instances()
