"""Architecture "qwen35moe": delta nets and gated attention;
as qwen35, with routed experts and a shared one.

The Spec says all of it; see hybrid.py.
"""

from __future__ import annotations

from voltapile.workers.models.hybrid import Hybrid


class Qwen35Moe(Hybrid):
    pass
