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

__all__ = ["ChatTemplate", "TemplateError"]

Message = Mapping[str, Any]

_KEY = "tokenizer.chat_template"
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PROBE = "probe-7f3a"
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
        self._takes_strings = self._shows(_PROBE)
        self._takes_parts = self._shows([{"type": "text", "text": _PROBE}])
        self.dialect, self.reasoning = dialect_of(self._tool_source), reasoning_of(source)
        self._takes_objects = "tool_calls" not in self._tool_source or self._shows_objects()

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> ChatTemplate:
        """The file's template; without one ChatML, if the vocabulary has its tokens."""
        source = metadata.get(_KEY)
        if not source:
            if "<|im_start|>" not in metadata.get("tokenizer.ggml.tokens", ()):
                raise TemplateError(
                    f"this model has no chat template (key {_KEY}) and no ChatML tokens; "
                    "use /v1/completions"
                )
            source = _CHATML
        return cls(
            source,
            tool_source=metadata.get(f"{_KEY}.tool_use"),
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
        prepared = dict(message)
        calls = message.get("tool_calls")
        if calls:
            as_wanted = _with_parsed_arguments if self._takes_objects else _with_json_arguments
            prepared["tool_calls"] = [as_wanted(call) for call in calls]
        if message.get("role") == "developer" and "developer" not in self.source:
            prepared["role"] = "system"  # OpenAI's newer name for it
        content = message.get("content")
        if content is None and not calls:
            content = ""
        if isinstance(content, list) and not self._takes_parts:
            content = _flattened(content)
        elif isinstance(content, str) and self._takes_parts and not self._takes_strings:
            content = [{"type": "text", "text": content}]
        prepared["content"] = content
        return prepared

    def _shows(self, content: Any) -> bool:
        """Whether a user message with this content comes out as its plain text."""
        messages = [{"role": "user", "content": content}]
        variables = {**self._tokens, "messages": messages, "add_generation_prompt": True}
        try:
            text = self._renderer.render(self.source, variables, seconds=PROBE_SECONDS)
        except TemplateError:
            return False
        return _PROBE in text and "'text'" not in text and '"text"' not in text

    def _shows_objects(self) -> bool:
        """Whether a call's arguments, given as an object, come out as JSON. Some templates want
        their text; where neither works the object is as good."""
        found = [self._shows_call(arguments) for arguments in ({_PROBE: 1}, f'{{"{_PROBE}": 1}}')]
        return found[0] or not found[1]

    def _shows_call(self, arguments: Any) -> bool:
        call = {"id": "call00000", "type": "function",
                "function": {"name": "f", "arguments": arguments}}  # fmt: skip
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "b", "tool_call_id": "call00000", "name": "f"},
        ]
        variables = {**self._tokens, "messages": messages, "add_generation_prompt": True}
        try:
            text = self._renderer.render(self._tool_source, variables, seconds=PROBE_SECONDS)
        except TemplateError:
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text and f'\\"{_PROBE}' not in text


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


def _with_parsed_arguments(call: Any) -> Any:
    """OpenAI sends a tool call's arguments as JSON text; templates expect the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _with_json_arguments(call: Any) -> Any:
    """The other way round."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _token_text(metadata: Mapping[str, Any], role: str) -> str:
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    token = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if not isinstance(token, Integral) or not 0 <= int(token) < len(tokens):
        return ""
    return str(tokens[int(token)])
