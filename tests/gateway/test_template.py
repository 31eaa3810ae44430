"""Renderings equal to the golden ones, and messages brought into the form a template expects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from voltapile.gateway.template import ChatTemplate, TemplateError
from voltapile.gateway.tokenizer import Tokenizer
from voltapile.shm.gguf import Gguf

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]

# The features that the templates of larger models use, in one.
RICH = """\
{%- macro content_of(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if item.type == 'image_url' %}{{- '<|image_pad|>' }}
            {%- elif 'text' in item %}{{- item.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set ns = namespace(last=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}{%- break %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- if tools %}{%- for tool in tools %}{{- tool | tojson ~ '\\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {{- '<' ~ message.role ~ '>' ~ content_of(message.content)|trim }}
    {%- for call in message.tool_calls or [] %}
        {%- for key, value in call.function.arguments|items %}
            {{- key + '=' + (value | tojson if value is mapping else value | string) + ';' }}
        {%- endfor %}
    {%- endfor %}
    {% generation %}{{- '</s>' }}{% endgeneration %}
{% endfor %}
{{- ns.last }}
{%- if add_generation_prompt %}
    {{- '<think>' if enable_thinking is undefined or enable_thinking else '<quiet>' }}
{%- endif %}"""


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.model
def test_golden_smollm2(golden: Path, smollm2: Path) -> None:
    with Gguf.open(smollm2) as gguf:
        template, tokenizer = ChatTemplate.from_metadata(gguf.metadata), Tokenizer.from_gguf(gguf)
    items = json.loads((golden / "smollm2/golden.json").read_text())["items"]
    chats = [item for item in items if "messages" in item]
    assert len(chats) == 5
    for item in chats:
        rendered = template.render(item["messages"])
        assert rendered == item["rendered"]
        without = template.render(item["messages"], add_generation_prompt=False)
        assert without == item["rendered_no_gen"]
        assert tokenizer.encode_chat(rendered) == item["ids"]


def test_golden_tiny(golden: Path, mini: Path) -> None:
    source = (golden / "tokenizer/tiny.chat_template.jinja").read_text()
    with Gguf.open(mini / "llama/model-f16.gguf") as gguf:
        template = ChatTemplate.from_metadata(gguf.metadata)
    assert template.source == source
    assert template.render([{"role": "system", "content": "S"}, *user("U")]) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_rich_template() -> None:
    template = ChatTemplate(RICH, bos="<s>")
    arguments = '{"city": "Köln", "n": {}}'
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        *user(PARTS),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        *user("a<b " + "\n"),
        *user(IMAGE),
    ]
    rendered = template.render(messages, tools=[{"name": "<é>"}], enable_thinking=False)
    assert rendered == (
        '<s>{"name": "<é>"}\n<user>onetwo</s><assistant>city=Köln;n={};</s>'
        "<user>a<b</s><user><|image_pad|></s>3<quiet>"
    )
    assert call["function"] == {"name": "f", "arguments": arguments}, "the caller's has changed"


def test_parts_for_a_template_of_strings() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}")
    assert template.render(user(PARTS)) == "user:one\ntwo"
    assert template.render(user(None)) == "user:"
    with pytest.raises(TemplateError, match="text only, not content of type 'image_url'"):
        template.render(user(IMAGE))


def test_strings_for_a_template_of_parts() -> None:
    source = "{% for part in messages[0].content %}{{ part['text'] }}{% endfor %}"
    assert ChatTemplate(source).render(user("hello")) == "hello"
    assert ChatTemplate(source).render(user(PARTS)) == "onetwo"


@pytest.mark.parametrize("arguments", ["{broken", "[1]", '"text"', {"a": 1}, "[" * 100_000])
def test_arguments_that_are_no_json_object_stay(arguments: Any) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments is mapping }}"
    call = {"function": {"name": "f", "arguments": arguments}}
    rendered = ChatTemplate(source).render([{"role": "assistant", "tool_calls": [call]}])
    assert rendered == str(isinstance(arguments, dict))


def test_a_template_may_refuse() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    )
    template = ChatTemplate(source)
    assert template.render(user("hi")) == "x"
    with pytest.raises(TemplateError, match=r"^no system role$"):
        template.render([{"role": "system", "content": "be good"}])


def test_without_a_template() -> None:
    tokens = ["a", "<|im_start|>", "<|im_end|>"]
    template = ChatTemplate.from_metadata({"tokenizer.ggml.tokens": tokens})
    expected = "<|im_start|>user\n hi \n<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(user(" hi \n")) == expected
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate.from_metadata({"tokenizer.ggml.tokens": ["a"]})


@pytest.mark.parametrize("key", ["tokenizer.chat_template", "tokenizer.chat_template.tool_use"])
def test_a_template_that_is_no_text_is_named(key: str) -> None:
    with pytest.raises(TemplateError, match=f"{key} is of type list; expected a text"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": "x", key: [1.0, 2.0]})


def test_tokens_and_the_template_for_tools_come_from_the_file() -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}plain{{ eos_token }}",
        "tokenizer.chat_template.tool_use": "{{ tools|length }} tools",
    }
    template = ChatTemplate.from_metadata(metadata)
    assert template.render(user("x")) == "<s>plain"
    assert template.render(user("x"), tools=[{}]) == "1 tools"
    template = ChatTemplate.from_metadata({**metadata, "tokenizer.ggml.bos_token_id": "x"})
    assert template.render(user("x")) == "plain", "the tokeniser refuses such a file"


STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('turns') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (STRICT, "s:1;u:2;a:3;u:4\n\n5;"),
        ("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}",
         "s:1;u:2;a:3;s:4;u:5;"),
    ],
)  # fmt: skip
def test_a_system_message_that_agents_send_in_the_middle(source: str, expected: str) -> None:
    roles = ("system", "user", "assistant", "system", "user")
    messages = [{"role": role, "content": str(n + 1)} for n, role in enumerate(roles)]
    assert ChatTemplate(source).render(messages) == expected


def test_arguments_without_keys_for_a_template_that_goes_through_keys() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments|items %}<{{ k }}>{{ v }};{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    function = {"name": "f", "arguments": "{broken"}
    call = {"id": "1", "type": "function", "function": function}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(source).render(messages) == "<raw_arguments>{broken;"


def test_ids_of_calls_as_mistral_wants_them() -> None:
    source = (
        "{{ tools }}[TOOL_CALLS][{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% if c.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}<{{ c.id }}>{% endfor %}"
        "{{ m.tool_call_id }}{% endfor %}"
    )
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "toolu_0123456789", "type": "function", "function": function}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": call["id"]},
    ]
    shown = ChatTemplate(source).render(messages).partition("<")[2]
    first, _, second = shown.partition(">")
    assert first == second
    assert len(first) == 9
