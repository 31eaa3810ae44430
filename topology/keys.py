"""A file's metadata below `{architecture}.`, with the checks that every architecture needs.

Knows types and ranges of values, not what they mean. What is wrong is a SpecError with the key.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
from voltapile.shm.gguf import REQUIRED, Gguf
from voltapile.topology.spec import SpecError


class Keys:
    """Metadata below `{architecture}.`, with the checks that every architecture needs."""

    def __init__(self, gguf: Gguf, architecture: str) -> None:
        self.gguf = gguf
        self.architecture = architecture

    def fail(self, key: str, message: str) -> NoReturn:
        raise SpecError(f"{self.gguf.path}: {self.architecture}.{key} {message}")

    def count(self, key: str, default: Any = REQUIRED, minimum: int = 1) -> int:
        """An integer; an array of one value for each layer serves where all are equal."""
        full = f"{self.architecture}.{key}"
        value = self.gguf.get(full, default)
        if isinstance(value, np.ndarray) and value.size:
            if (value != value[0]).any():
                self.fail(
                    key,
                    f"differs between layers ({value.min()} to {value.max()}), "
                    "which is not supported yet",
                )
            value = value[0].item()
        if type(value) is not int:
            value = self.gguf.get(full, default, int)
        if not minimum <= value < 2**31:
            self.fail(key, f"is {value}, expected {minimum} to 2^31 - 1")
        return int(value)

    def has(self, key: str) -> bool:
        return self.gguf.get(f"{self.architecture}.{key}", None) is not None

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """A finite number that is not negative."""
        value = self.gguf.get(f"{self.architecture}.{key}", default, float)
        if not (math.isfinite(value) and value >= 0):
            self.fail(key, f"is {value}, expected a finite number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        return str(self.gguf.get(f"{self.architecture}.{key}", default, str))

    def numbers(self, key: str) -> tuple[int, ...]:
        """An array of integers."""
        value = self.gguf.get(f"{self.architecture}.{key}", REQUIRED, list)
        if not all(isinstance(each, int) for each in value):
            self.fail(key, f"is {value}, expected integers")
        return tuple(value)

    def pattern(self, key: str, default: int, layers: int) -> tuple[bool, ...]:
        """For each layer, if it is one of most: given as flags, or as a number n that makes every
        nth layer the odd one out (0: none)."""
        value = self.gguf.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray):
            if len(value) != layers:
                self.fail(key, f"has {len(value)} entries, expected {layers}")
            return tuple(bool(flag) for flag in value)
        period = self.count(key, default, minimum=0)
        return tuple(period == 0 or i % period < period - 1 for i in range(layers))
