"""Architecture "qwen3next": delta nets and gated attention;
routed experts; value heads of delta nets in the order of key heads.

The Spec says all of it; see hybrid.py.
"""

from __future__ import annotations

from voltapile.workers.models.hybrid import Hybrid


class Qwen3Next(Hybrid):
    pass
