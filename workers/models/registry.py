"""Which class builds which architecture: one line for each file of this folder."""

from __future__ import annotations

from voltapile.workers.models.blocks import Model
from voltapile.workers.models.gemma3 import Gemma3
from voltapile.workers.models.llama import Llama
from voltapile.workers.models.qwen2 import Qwen2
from voltapile.workers.models.qwen3 import Qwen3
from voltapile.workers.models.qwen3moe import Qwen3Moe
from voltapile.workers.models.qwen3next import Qwen3Next
from voltapile.workers.models.qwen4exp import Qwen4Exp
from voltapile.workers.models.qwen35 import Qwen35
from voltapile.workers.models.qwen35moe import Qwen35Moe

MODELS: dict[str, type[Model]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gemma3": Gemma3,
    "qwen3moe": Qwen3Moe,
    "qwen3next": Qwen3Next,
    "qwen35": Qwen35,
    "qwen35moe": Qwen35Moe,
    "qwen4exp": Qwen4Exp,
}


# What each backend has beyond the dense models: see kernels/families.py.
HAVE_FAMILIES = ("cpu", "cuda", "reference")
FAMILIES = ("qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp")


def computable(backend: str) -> list[str]:
    """The architectures that a backend can compute."""
    missing = () if backend in HAVE_FAMILIES else FAMILIES
    return sorted(set(MODELS) - set(missing))


def model_class(architecture: str) -> type[Model]:
    """Raises ValueError for an architecture that no file here describes."""
    if architecture not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {known}")
    return MODELS[architecture]
