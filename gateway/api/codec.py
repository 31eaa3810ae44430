"""JSON in and out: orjson where it is installed, the standard library otherwise.

orjson is built with Rust and may be absent on POWER; the fallback refuses what orjson refuses
(NaN, lone surrogates, deep nesting). It knows nothing of HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

try:
    import orjson as _orjson
except ImportError:  # pragma: no cover  (no wheel for this machine)
    _orjson = None  # type: ignore[assignment]


class JsonError(ValueError):
    """Bytes that are not JSON."""


def loads(data: bytes) -> Any:
    """The value in `data`, UTF-8. Raises JsonError."""
    return _loads_slow(data) if _orjson is None else _loads_fast(data)


def _loads_fast(data: bytes) -> Any:
    try:
        return _orjson.loads(data)
    except ValueError as error:
        raise JsonError(str(error)) from error


def _loads_slow(data: bytes) -> Any:
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:  # an escape may be half of a surrogate pair, which UTF-8 cannot hold
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise JsonError(str(error)) from error
    return value


def _dumps_slow(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


# A value as compact UTF-8 JSON.
dumps: Callable[[Any], bytes] = _dumps_slow if _orjson is None else _orjson.dumps


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not JSON")
