"""JSON schemas as grammars: what of them can be compiled, and which keyword is at fault otherwise.

It looks at schemas only; grammar.py compiles what it makes of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from voltapile.gateway.dialects.dialect import json_rule

# Parts of llguidance's messages, and what a schema's author calls them.
_KEYWORDS = (
    ("regex parse error", "pattern"),
    ("regex", "pattern"),
    ("Pointer", "$ref"),
    ("Resource", "$ref"),
    ("ref", "$ref"),
    ("Invalid type", "type"),
    ("type must be", "type"),
    ("incompatible types", "type"),
    ("properties must be", "properties"),
    ("anyOf", "anyOf"),
    ("multiple of", "multipleOf"),
    ("minimum (", "minimum"),
    ("format", "format"),
    ("enum", "enum"),
    ("required", "required"),
)


_SOURCE = re.compile(r"\n\s*\d+ \| ")  # lines of the grammar, which the client did not write
_NOISE = re.compile(r"<non-verbose/>|^at \d+\(\d+\): |failed to compile JSON schema: ")


def json_grammar(schema: Any) -> str:
    """Lark whose answer is JSON of this schema."""
    return "start: answer\n" + json_rule("answer", schema)


def explained(message: str) -> str:
    """llguidance's message in one line, beginning with the keyword that is at fault."""
    text = _NOISE.sub("", _SOURCE.split(message, maxsplit=1)[0])
    text = " ".join(text.split())[:400]
    if text.startswith("Unimplemented keys: "):
        keys = json.loads(text.removeprefix("Unimplemented keys: "))
        return f"the keyword '{keys[0]}' is not supported"
    if "NoExtensionBias" in text:
        return "no answer that it allows has an end"
    if "recursion limit" in text:
        return "it is nested too deeply"
    keyword = next((name for part, name in _KEYWORDS if part in text), "")
    return f"the keyword '{keyword}': {text}" if keyword else text


def endless(schema: Any) -> str:
    """A $ref that only leads to itself, so that no answer is ever complete; "" if there is none."""
    refs = sorted(_refs(schema))
    finite = dict.fromkeys(refs, False)
    changed = True
    while changed:
        changed = False
        for ref in refs:
            if not finite[ref] and _is_finite(_target(schema, ref), finite):
                finite[ref] = changed = True
    if _is_finite(schema, finite):
        return ""
    return next((ref for ref in refs if not finite[ref]), "#")


def _refs(schema: Any) -> set[str]:
    found: set[str] = set()
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            if isinstance(value.get("$ref"), str):
                found.add(value["$ref"])
            left += value.values()
        elif isinstance(value, list):
            left += value
    return found


def _target(schema: Any, ref: str) -> Any:
    """What a local reference means; True, which anything fits, where it is not ours to find."""
    if not ref.startswith("#"):
        return True
    value = schema
    for part in ref[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, Mapping) and key in value:
            value = value[key]
        else:
            return True
    return value


def _is_finite(schema: Any, finite: Mapping[str, bool]) -> bool:
    """Some value of it is finite, given which references have one."""
    if not isinstance(schema, Mapping):
        return True
    if isinstance(ref := schema.get("$ref"), str) and not finite[ref]:
        return False
    for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        parts = schema.get(key)
        if isinstance(parts, list) and not enough(_is_finite(part, finite) for part in parts):
            return False
    if schema.get("type", "object") == "object":
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            names = [name for name in required if isinstance(name, str)]
            if not all(_is_finite(properties.get(name), finite) for name in names):
                return False
    least = schema.get("minItems")
    if schema.get("type", "array") == "array" and isinstance(least, int) and least > 0:
        return _is_finite(schema.get("items"), finite)
    return True
