"""Architecture "qwen35": delta nets and gated attention;
a dense feed-forward net; value heads of delta nets take key heads in turn.

The Spec says all of it; see hybrid.py.
"""

from __future__ import annotations

from voltapile.workers.models.hybrid import Hybrid


class Qwen35(Hybrid):
    pass
