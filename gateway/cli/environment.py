"""What commands read of the environment: no more than what CUDA reads of it, too.

Everything else is an option. This is the only file that may look there; what it finds is handed to
those who plan.
"""

from __future__ import annotations

import os


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES; None: not set, "": no GPU."""
    from voltapile.topology.visible import VARIABLE

    return os.environ.get(VARIABLE)
