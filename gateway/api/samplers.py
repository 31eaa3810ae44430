"""llama-server's `samplers`: which filters a request wants, and in which order.

Ours is fixed. A list whose order gives the same answer is obeyed, filters that it leaves out being
switched off; any other is refused, since an order that is ignored would change the answer unseen.
"""

from __future__ import annotations

from typing import Any

from voltapile.gateway.api.errors import bad_request
from voltapile.gateway.api.fields import Fields

ORDER = ["penalties", "temperature", "top_k", "top_p", "min_p"]
PENALTIES = ("repetition_penalty", "repeat_penalty", "presence_penalty", "frequency_penalty")
# What each reads, with the value that switches it off.
OFF: dict[str, dict[str, Any]] = {
    "penalties": dict.fromkeys((*PENALTIES, "repeat_last_n")),
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
}
LETTERS = {"e": "penalties", "t": "temperature", "k": "top_k", "p": "top_p", "m": "min_p"}


def obeyed(fields: Fields) -> Fields:
    """The fields without what `samplers` leaves out. Raises a 400 where its order would tell."""
    value = fields.values.get("samplers")
    if value is None:
        return fields
    names = [name for name in _names(value) if name in OFF]  # all others are off, or refused
    off = {key: none for name in OFF if name not in names for key, none in OFF[name].items()}
    left = Fields({**fields.values, **off})
    if not _is_ours(names, left):
        message = (
            f"'samplers' {names} is an order that this server cannot follow; it computes "
            f"{', '.join(ORDER)}: name temperature before top_p and min_p, or leave 'samplers' out"
        )
        raise bad_request(message, "samplers", "unsupported_parameter")
    return left


def _names(value: Any) -> list[str]:
    """Of a list of names or a string of letters."""
    found = [LETTERS.get(each, each) for each in value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        message = "'samplers' must be a list of names or a string of letters"
        raise bad_request(message, "samplers", "invalid_type")
    return found


def _is_ours(names: list[str], fields: Fields) -> bool:
    """Whether our order gives the same. Top_k takes the same tokens at any temperature, and the
    tokens that top_p and min_p take depend on it unless it is 1, or 0 and there is one only."""
    temperature = fields.number("temperature", 1.0, 0.0, 100.0)
    filters = {
        "top_k": (fields.integer("top_k") or 0) > 0,
        "top_p": fields.number("top_p", 1.0, 0.0, 1.0) < 1,
        "min_p": fields.number("min_p", 0.0, 0.0, 1.0) > 0,
    }
    if temperature == 0:
        acting = [name for name in names if name == "penalties"]
    else:
        acting = [name for name in names if filters.get(name, name == "penalties")]
    if acting != [name for name in ORDER if name in acting]:
        return False
    if temperature in (0, 1) or "temperature" not in names:
        return True
    behind = names[: names.index("temperature")]
    return not any(name in behind and filters[name] for name in ("top_p", "min_p"))
