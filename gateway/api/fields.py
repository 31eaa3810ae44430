"""Fields: typed reading of a JSON object that a client sent.

Each method returns the field, or its default where the field is absent or null, and raises a 400
that names the field otherwise. bool is never a number here. It does not know which fields exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from voltapile.gateway.api import codec
from voltapile.gateway.api.errors import ApiError, bad_request


class Fields:
    """One JSON object. prefix: how errors name the one that holds it, e.g. "stream_options."."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values, self._prefix = values, prefix

    @classmethod
    def parse(cls, body: bytes) -> Fields:
        try:
            value = codec.loads(body)
        except codec.JsonError as error:
            raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from error
        if not isinstance(value, dict):
            raise bad_request(f"the body is {kind(value)}, not a JSON object")
        return cls(value)

    def over(self, defaults: Mapping[str, Any]) -> Fields:
        """With `defaults` where a field is absent or null."""
        if not defaults:
            return self
        given = {name: value for name, value in self.values.items() if value is not None}
        return Fields({**defaults, **given}, self._prefix)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def number(
        self, name: str, default: float, low: float, high: float, *, above_low: bool = False
    ) -> float:
        """A number within [low, high], or (low, high] with above_low."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number", value)
        if not low <= value <= high or (above_low and value == low):
            bound = f"above {low:g}" if above_low else f"at least {low:g}"
            path = self._prefix + name
            raise bad_request(
                f"'{path}' must be {bound} and at most {high:g}, not {value}", path, "out_of_range"
            )
        return float(value)

    def integer(self, name: str) -> int | None:
        """A whole number, also written as 1e3; None where it is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "a whole number", value)
        return value

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def object(self, name: str) -> Fields:
        """A nested object; an empty one where it is absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Fields(value or {}, f"{self._prefix}{name}.")

    def list(self, name: str) -> list[Any]:
        """A list that must be there; its items are the caller's to check."""
        value = self.values.get(name)
        if value is None:
            path = self._prefix + name
            raise bad_request(f"'{path}' is missing", path, "missing_required_parameter")
        if not isinstance(value, list):
            raise self._wrong(name, "a list", value)
        return value

    def _wrong(self, name: str, wanted: str, value: Any) -> ApiError:
        path = self._prefix + name
        return bad_request(f"'{path}' must be {wanted}, not {kind(value)}", path, "invalid_type")


def token_ids(value: list[Any], param: str, vocab_size: int) -> list[int]:
    """`value` as token ids. Raises a 400 that names the first item that is none."""
    for i, token in enumerate(value):
        token_id(token, f"{param}[{i}]", vocab_size)
    return value


def token_id(token: Any, param: str, vocab_size: int) -> int:
    if isinstance(token, bool) or not isinstance(token, int):
        message = f"'{param}' must be a token id, not {kind(token)}"
        raise bad_request(message, param, "invalid_type")
    if not 0 <= token < vocab_size:
        message = f"'{param}' is {token}, but token ids go from 0 to {vocab_size - 1}"
        raise bad_request(message, param, "invalid_token")
    return token


def kind(value: Any) -> str:
    """What a client would call the type of `value`."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
