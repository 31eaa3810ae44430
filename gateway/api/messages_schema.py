"""What Anthropic's clients send to /v1/messages, as the ChatRequest that a chat would have been.

Blocks become the messages that chat templates know: thinking goes to reasoning_content, tool_use to
tool_calls, each tool_result is a message of its own. It does not know how the answer looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from voltapile.gateway.api.errors import ApiError, bad_request
from voltapile.gateway.api.fields import Fields, kind
from voltapile.gateway.api.options import NO_DEFAULTS, UNLIMITED, Defaults, read_options
from voltapile.gateway.api.schema import ChatRequest, template_kwargs
from voltapile.gateway.api.tools import ToolUse, tool_use

BILLING = "x-anthropic-billing-header:"  # a line that changes with every request of Claude Code
ROLES = ("user", "assistant", "system")
CHOICES = {"auto": "auto", "any": "required", "tool": "", "none": "none"}
TAKEN = ("max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream", "model",
         "seed", "min_p", "cache_prompt", "ignore_eos")  # fmt: skip


def messages_request(body: bytes, vocab_size: int, defaults: Defaults = NO_DEFAULTS) -> ChatRequest:
    fields = Fields.parse(body)
    thinking = fields.object("thinking")
    thinks = _thinks(thinking)
    taken = {name: fields.values[name] for name in TAKEN if name in fields.values} | _form(fields)
    if thinks:
        thinking.number("budget_tokens", -1, -1, 2**31)  # or the error has another name
        taken["reasoning_budget"] = thinking.integer("budget_tokens")
    options = read_options(
        Fields(taken).over(defaults),
        default_tokens=UNLIMITED,
        logprobs=-1,
        vocab_size=vocab_size,
    )
    if fields.values.get("stop_sequences") is not None:
        fields.list("stop_sequences")
    given = fields.list("messages")
    if not given:
        raise bad_request("'messages' must not be empty", "messages")
    messages = _system(fields.values.get("system"))
    for i, message in enumerate(given):
        messages += _messages(message, f"messages[{i}]")
    prefill = _prefill(messages, thinks)
    if not messages:
        raise bad_request("'messages' must hold something to answer", "messages")
    kwargs = template_kwargs(fields.over(defaults))
    return ChatRequest(
        messages=messages,
        template_kwargs={"enable_thinking": thinks} | kwargs,
        options=options,
        use=_tool_use(fields),
        body_bytes=len(body),
        prefill=prefill,
    )


def _tool_use(fields: Fields) -> ToolUse:
    """The client's own tools; those of Anthropic's servers are not here."""
    given = fields.values.get("tools")
    tools = None
    if given is not None:
        tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.list("tools"))]
    choice = fields.object("tool_choice")
    kind_of_choice = choice.text("type") or "auto"
    if kind_of_choice not in CHOICES:
        message = f"'tool_choice.type' must be one of {', '.join(CHOICES)}"
        raise bad_request(message, "tool_choice.type")
    wanted: Any = CHOICES[kind_of_choice]
    if kind_of_choice == "tool":
        wanted = {"function": {"name": _text(choice, "name", "tool_choice")}}
    many = not choice.flag("disable_parallel_tool_use")
    values = {"tools": tools, "tool_choice": wanted, "parallel_tool_calls": many}
    return tool_use(Fields(values))


def _tool(tool: Any, param: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise bad_request(f"'{param}' must be an object, not {kind(tool)}", param, "invalid_type")
    kind_of_tool = tool.get("type")
    if kind_of_tool not in (None, "custom"):
        message = f"'{param}' is of type {kind_of_tool!r:.60}; only custom tools are supported"
        raise bad_request(message, param, "unsupported_tool")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        what = f"'{param}.input_schema' must be an object, not {kind(schema)}"
        raise bad_request(what, f"{param}.input_schema", "invalid_type")
    function = {"name": tool.get("name"), "parameters": schema}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _form(fields: Fields) -> dict[str, Any]:
    """Anthropic's way to ask for JSON of a schema, as OpenAI's."""
    form = fields.object("output_config").object("format")
    if not form.values:
        return {}
    if form.values.get("type") != "json_schema":
        message = "'output_config.format.type' must be json_schema"
        raise bad_request(message, "output_config.format.type")
    schema = {"schema": form.object("schema").values}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _thinks(thinking: Fields) -> bool:
    """Off where nothing is said, as at Anthropic's."""
    wanted = thinking.text("type")
    if wanted not in (None, "enabled", "disabled", "adaptive"):
        message = f"'thinking.type' must be enabled, adaptive or disabled, not '{wanted:.40}'"
        raise bad_request(message, "thinking.type")
    return wanted in ("enabled", "adaptive")


def _prefill(messages: list[dict[str, Any]], thinks: bool) -> str:
    """Takes the assistant's last message out, if there is one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return ""
    if thinks:
        message = "the last message must be the user's while thinking is on"
        raise bad_request(message, "messages")
    messages.pop()
    return str(last["content"]).rstrip()


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None:
        return []
    texts = [_unbilled(text) for text in _texts(system, "system")]
    text = "\n".join(text for text in texts if text)
    return [{"role": "system", "content": text}] if text else []


def _unbilled(text: str) -> str:
    """Without the lines that would make every prompt a new one from its beginning."""
    if BILLING not in text.lower():
        return text
    lines = text.split("\n")
    return "\n".join(line for line in lines if not line.lower().startswith(BILLING)).strip("\n")


def _messages(message: Any, param: str) -> list[dict[str, Any]]:
    if not isinstance(message, dict):
        raise bad_request(f"'{param}' must be an object, not {kind(message)}", param)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        what = f"'{param}.role' must be user or assistant, not {role!r:.40}"
        raise bad_request(what, f"{param}.role")
    where = f"{param}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [_block(block, f"{where}[{i}]") for i, block in enumerate(_list(content, where))]
    if role == "assistant":
        return [_assistant(blocks, where)]
    return list(_of_user(role, blocks, where))


def _assistant(blocks: list[Fields], param: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        where = f"{param}[{i}]"
        match block.values["type"]:
            case "text":
                texts.append(_text(block, "text", where))
            case "thinking":
                thoughts.append(_text(block, "thinking", where))
            case "redacted_thinking":
                pass  # nobody here can read it
            case "tool_use":
                calls.append(_call(block, where))
            case other:
                raise _unknown(other, where)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _of_user(role: str, blocks: list[Fields], param: str) -> Iterator[dict[str, Any]]:
    """Results of tools as messages of their own, in the order in which they stand."""
    texts: list[str] = []
    for i, block in enumerate(blocks):
        where = f"{param}[{i}]"
        match block.values["type"]:
            case "text":
                texts.append(_text(block, "text", where))
            case "document":
                texts.append(_document(block, where))
            case "tool_result":
                if texts:
                    yield {"role": role, "content": "\n".join(texts)}
                    texts = []
                yield _result(block, where)
            case other:
                raise _unknown(other, where)
    if texts or not blocks:
        yield {"role": role, "content": "\n".join(texts)}


def _call(block: Fields, param: str) -> dict[str, Any]:
    arguments = block.values.get("input")
    if not isinstance(arguments, dict):
        what = f"'{param}.input' must be an object, not {kind(arguments)}"
        raise bad_request(what, f"{param}.input", "invalid_type")
    function = {"name": _text(block, "name", param), "arguments": arguments}
    return {"id": _text(block, "id", param), "type": "function", "function": function}


def _result(block: Fields, param: str) -> dict[str, Any]:
    content = block.values.get("content")
    texts = [] if content is None else _texts(content, f"{param}.content")
    call = _text(block, "tool_use_id", param)
    return {"role": "tool", "tool_call_id": call, "content": "\n".join(texts)}


def _document(block: Fields, param: str) -> str:
    source = block.object("source")
    if source.values.get("type") != "text":
        raise _unknown("document", param)
    return _text(source, "data", f"{param}.source")


def _texts(value: Any, param: str) -> list[str]:
    """A string, or the text blocks of a list; nothing else is understood."""
    if isinstance(value, str):
        return [value]
    texts = []
    for i, item in enumerate(_list(value, param)):
        where = f"{param}[{i}]"
        block = _block(item, where)
        if block.values["type"] != "text":
            raise _unknown(block.values["type"], where)
        texts.append(_text(block, "text", where))
    return texts


def _block(value: Any, param: str) -> Fields:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise bad_request(f"'{param}' must be an object with a type", param, "invalid_type")
    return Fields(value)


def _list(value: Any, param: str) -> list[Any]:
    if not isinstance(value, list):
        what = f"'{param}' must be a string or a list of blocks, not {kind(value)}"
        raise bad_request(what, param, "invalid_type")
    return value


def _text(block: Fields, name: str, param: str) -> str:
    value = block.values.get(name)
    if not isinstance(value, str):
        what = f"'{param}.{name}' must be a string, not {kind(value)}"
        raise bad_request(what, f"{param}.{name}", "invalid_type")
    return value


def _unknown(block: str, param: str) -> ApiError:
    what = f"'{param}' is of type '{block:.40}', which is not supported here"
    return bad_request(what, param, "unsupported_content")
