"""What clients say of an answer's form: response_format, json_schema, grammar and vLLM's names.

It turns each into a Constraint, or a 400 that names the field and the schema's keyword; compiling
is grammar.py's, and what a chat adds to it is bounds.py's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from voltapile.gateway.api.errors import ApiError, bad_request
from voltapile.gateway.api.fields import Fields, kind
from voltapile.gateway.dialects.dialect import quoted
from voltapile.gateway.schemas import endless, json_grammar

MAX_DEPTH = 100  # of a schema


@dataclass(frozen=True, slots=True)
class Constraint:
    """param: the field that asked. lark: the grammar; "" where it is `gbnf` that still has to
    become one. is_schema: it is a JSON schema."""

    param: str
    lark: str = ""
    gbnf: str = ""
    regex: str = ""
    is_schema: bool = False


def constraint(fields: Fields) -> Constraint | None:
    """None: any text will do."""
    found = [one for one in (_response_format(fields), *_llama(fields), *_vllm(fields)) if one]
    if len(found) > 1:
        message = f"'{found[0].param}' and '{found[1].param}' cannot hold at once"
        raise bad_request(message, found[1].param)
    return found[0] if found else None


def _response_format(fields: Fields) -> Constraint | None:
    form = fields.object("response_format")
    name = form.values.get("type")
    param = "response_format"
    if name is None and not form.values:
        return None
    if name == "text":
        return None
    if name == "json_object":
        return _schema(form.values.get("schema") or {"type": "object"}, param)
    if name == "json_schema":
        inner = form.values.get("json_schema")
        if not isinstance(inner, dict):
            raise _missing(f"{param}.json_schema", inner)
        if not isinstance(inner.get("schema"), dict):
            raise _missing(f"{param}.json_schema.schema", inner.get("schema"))
        return _schema(inner["schema"], f"{param}.json_schema.schema")
    message = f"'{param}.type' must be text, json_object or json_schema, not {name!r:.60}"
    raise bad_request(message, f"{param}.type")


def _llama(fields: Fields) -> list[Constraint | None]:
    """llama-server's. An empty schema is one that all JSON fits."""
    schema, grammar = fields.values.get("json_schema"), fields.text("grammar")
    return [
        None if schema is None else _schema(schema, "json_schema"),
        Constraint("grammar", gbnf=grammar) if grammar else None,
    ]


def _vllm(fields: Fields) -> list[Constraint | None]:
    """vLLM's: guided_*, and the newer structured_outputs that hold them."""
    asked = fields.object("structured_outputs")
    found: list[Constraint | None] = []
    for name in ("json", "regex", "choice", "grammar"):
        for param, value in (
            (f"guided_{name}", fields.values.get(f"guided_{name}")),
            (f"structured_outputs.{name}", asked.values.get(name)),
        ):
            if value is not None:
                found.append(_guided(name, value, param))
    if asked.flag("json_object"):
        found.append(_schema({"type": "object"}, "structured_outputs.json_object"))
    if asked.values.get("structural_tag") is not None:
        param = "structured_outputs.structural_tag"
        raise bad_request(f"'{param}' is not supported", param, "unsupported_parameter")
    return found


def _guided(name: str, value: Any, param: str) -> Constraint:
    if name == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise bad_request(f"'{param}' is not JSON: {error}", param) from error
        return _schema(value, param)
    if name == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise bad_request(f"'{param}' must be a list of strings", param, "invalid_type")
        return Constraint(param, f"start: {' | '.join(map(quoted, value))}")
    if not isinstance(value, str) or not value:
        raise bad_request(f"'{param}' must be a string", param, "invalid_type")
    if name == "regex":
        return Constraint(param, regex=value)
    return Constraint(param, gbnf=value)


def _schema(schema: Any, param: str) -> Constraint:
    if not isinstance(schema, dict):
        raise _missing(param, schema)
    if _depth(schema) > MAX_DEPTH:
        raise refused(param, f"it is nested more than {MAX_DEPTH} deep")
    if ref := endless(schema):
        raise refused(param, f"the keyword '$ref': {ref} has no end, as it always holds itself")
    return Constraint(param, json_grammar(schema), is_schema=True)


def refused(param: str, why: str) -> ApiError:
    return bad_request(f"'{param}' cannot be used: {why}", param, "invalid_schema")


def _missing(param: str, value: Any) -> ApiError:
    return bad_request(f"'{param}' must be an object, not {kind(value)}", param, "invalid_type")


def _depth(value: Any) -> int:
    """Levels of objects and lists, found without recursion."""
    deepest, left = 0, [(value, 1)]
    while left:
        one, depth = left.pop()
        deepest = max(deepest, depth)
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        left += [(each, depth + 1) for each in inner]
    return deepest
