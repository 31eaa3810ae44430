"""Chat templates: a conversation to the text of a prompt, by the Jinja2 template in the GGUF file.

Templates are strangers' programs, so they run in a process of their own (renderer.py), which ends
with the ChatTemplate. Everything that goes wrong in one is a TemplateError, whose text may be shown
to the caller. A ChatTemplate does not change after it is built. It knows nothing of token ids.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from voltapile.gateway.dialects.dialect import Tool
from voltapile.gateway.dialects.recognise import dialect_of, reasoning_of
from voltapile.gateway.renderer import Renderer, TemplateError
from voltapile.gateway.turns import in_turns

__all__ = ["ChatTemplate", "TemplateError"]

Message = Mapping[str, Any]

_KEY = "tokenizer.chat_template"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PROBE, _FIRST = "probe-7f3a", "first-7f3a"
PROBE_SECONDS = 0.5


class ChatTemplate:
    """A model's way of writing conversations. dialect: of tool calls. reasoning: its markers."""

    def __init__(
        self, source: str, *, tool_source: str | None = None, bos: str = "", eos: str = ""
    ) -> None:
        """tool_source: a second template, used for requests with tools."""
        self.source = source
        self._tool_source = tool_source or source
        self._renderer = Renderer()
        self._turn = asyncio.Lock()
        for each in (self.source, self._tool_source):
            self._renderer.check(each)
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._takes_strings = self._takes_parts = True
        self._takes_strings = self._shows(_PROBE)
        self._takes_parts = self._shows([{"type": "text", "text": _PROBE}])
        self.dialect, self.reasoning = dialect_of(self._tool_source), reasoning_of(source)
        self._takes_late_system = self._shows_late_system()
        self._takes_neighbours = _PROBE in self._probed(
            source, _of("user", "a"), _of("user", _PROBE)
        )
        self._takes_objects = self._takes_texts = True  # as arguments of calls
        if "tool_calls" in self._tool_source:
            given = {_PROBE: 1}, f'{{"{_PROBE}": 1}}', _PROBE
            as_object, as_json, as_word = map(self._called, given)
            # Where neither comes out as JSON the object is as good as its text.
            self._takes_objects = _holds_json(as_object) or not _holds_json(as_json)
            self._takes_texts = _PROBE in as_word or _PROBE not in as_object

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], instead: str = "") -> ChatTemplate:
        """The file's template; without one ChatML, if the vocabulary has its tokens.

        instead: of the file's."""
        source = instead or _source(metadata, _KEY)
        if not source:
            if "<|im_start|>" not in metadata.get("tokenizer.ggml.tokens", ()):
                raise TemplateError(
                    f"this model has no chat template (key {_KEY}) and no ChatML tokens; "
                    "use /v1/completions"
                )
            source = CHATML
        return cls(
            source,
            tool_source=None if instead else _source(metadata, f"{_KEY}.tool_use"),
            bos=_token_text(metadata, "bos"),
            eos=_token_text(metadata, "eos"),
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """kwargs go to the template as they are (enable_thinking, documents, ...)."""
        prepared = [self._prepared(message) for message in messages]
        if self.dialect.prepared is not None:
            prepared = self.dialect.prepared(prepared, [_tool(tool) for tool in tools or ()])
            tools = None
        prepared = in_turns(prepared, self._takes_late_system, self._takes_neighbours)
        return self._renderer.render(
            self._tool_source if tools else self.source,
            {
                "documents": None,
                **kwargs,
                **self._tokens,
                "messages": prepared,
                "tools": list(tools) if tools else None,
                "add_generation_prompt": add_generation_prompt,
            },
        )

    async def rendered(self, messages: Sequence[Message], **kwargs: Any) -> str:
        """`render`, while the event loop goes on."""
        async with self._turn:  # or others would wait in the threads that everybody shares
            return await asyncio.to_thread(self.render, messages, **kwargs)

    def close(self) -> None:
        self._renderer.close()

    def _prepared(self, message: Message) -> dict[str, Any]:
        """A copy in the form that the template expects."""
        prepared = self._renamed(message, "tool_call_id")
        calls = message.get("tool_calls")
        if calls:
            prepared["tool_calls"] = [self._as_wanted(call) for call in calls]
        if message.get("role") == "developer" and "developer" not in self.source:
            prepared["role"] = "system"  # OpenAI's newer name for it
        if message.get("content") is None and not calls:
            prepared["content"] = ""
        return self._with_content(prepared)

    def _with_content(self, message: Message) -> dict[str, Any]:
        """Texts or parts, as the template takes them."""
        content = message.get("content")
        if isinstance(content, list) and not self._takes_parts:
            content = _flattened(content)
        elif isinstance(content, str) and self._takes_parts and not self._takes_strings:
            content = [{"type": "text", "text": content}]
        return {**message, "content": content}

    def _as_wanted(self, call: Any) -> Any:
        """OpenAI sends a tool call's arguments as JSON text; most templates expect the object."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        given = function.get("arguments")
        if not self._takes_objects:
            wanted = json.dumps(given, ensure_ascii=False) if isinstance(given, Mapping) else given
        else:
            wanted = _parsed(given)
            if isinstance(wanted, str) and not self._takes_texts:
                wanted = {"raw_arguments": wanted}  # the template goes through keys
        return self._renamed(call, "id") | {"function": {**function, "arguments": wanted}}

    def _renamed(self, value: Mapping[str, Any], key: str) -> dict[str, Any]:
        """A copy with the id of a call as the dialect wants it."""
        name, rename = value.get(key), self.dialect.call_id
        if rename is None or not isinstance(name, str):
            return dict(value)
        return {**value, key: rename(name)}

    def _shows(self, content: Any) -> bool:
        """Whether a user message with this content comes out as its plain text."""
        text = self._probed(self.source, _of("user", content))
        return _PROBE in text and "'text'" not in text and '"text"' not in text

    def _shows_late_system(self) -> bool:
        first = _of("system", _FIRST), _of("user", "a"), _of("assistant", "b")
        messages = (*first, _of("system", _PROBE), _of("user", "c"))
        text = self._probed(self.source, *messages)
        return _PROBE in text and _FIRST in text  # some keep the last one only

    def _probed(self, source: str, *messages: Message) -> str:
        """ "" if the template refuses them."""
        shown = [self._with_content(message) for message in messages]
        variables = {**self._tokens, "messages": shown, "add_generation_prompt": True}
        try:
            return self._renderer.render(source, variables, seconds=PROBE_SECONDS)
        except TemplateError:
            return ""

    def _called(self, arguments: Any) -> str:
        """A conversation with a call of these arguments."""
        call = {"id": "call00000", "type": "function",
                "function": {"name": "f", "arguments": arguments}}  # fmt: skip
        messages: list[Message] = [
            _of("user", "a"),
            {**_of("assistant", ""), "tool_calls": [call]},
            {**_of("tool", "b"), "tool_call_id": "call00000", "name": "f"},
        ]
        return self._probed(self._tool_source, *messages)


def _holds_json(text: str) -> bool:
    return _PROBE in text and f"'{_PROBE}'" not in text and f'\\"{_PROBE}' not in text


def _of(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _tool(tool: Mapping[str, Any]) -> Tool:
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(function["name"], function.get("description") or "", schema)


def _flattened(parts: Sequence[Any]) -> str:
    """The text parts, a line each, for templates that know strings only."""
    texts = []
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TemplateError(f"this model takes text only, not content of type '{kind}'")
        texts.append(part["text"])
    return "\n".join(texts)


def _parsed(arguments: Any) -> Any:
    """The object that a text stands for; what stands for none stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _source(metadata: Mapping[str, Any], key: str) -> str | None:
    source = metadata.get(key)
    if source is not None and not isinstance(source, str):
        raise TemplateError(f"{key} is of type {type(source).__name__}; expected a text")
    return source


def _token_text(metadata: Mapping[str, Any], role: str) -> str:
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    token = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if not isinstance(token, Integral) or not 0 <= int(token) < len(tokens):
        return ""
    return str(tokens[int(token)])
