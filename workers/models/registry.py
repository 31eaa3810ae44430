"""Which class builds which architecture: one line for each file of this folder."""

from __future__ import annotations

from voltapile.workers.models.blocks import Model
from voltapile.workers.models.gemma3 import Gemma3
from voltapile.workers.models.llama import Llama
from voltapile.workers.models.qwen2 import Qwen2
from voltapile.workers.models.qwen3 import Qwen3

MODELS: dict[str, type[Model]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gemma3": Gemma3,
}


def model_class(architecture: str) -> type[Model]:
    """Raises ValueError for an architecture that no file here describes."""
    if architecture not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {known}")
    return MODELS[architecture]
