import pytest
from voltapile.gateway.dialects.recognise import dialect_of, reasoning_of

TEMPLATES = {
    "hermes": "{% if tools %}return json within <tool_call></tool_call>{% endif %}",
    "qwen_xml": "{% if tools %}<tool_call>\n<function=example>\n<parameter=a>{% endif %}",
    "functionary": "{% if tools %}<function=example>{}</function>{% endif %}",
    "mistral": "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]",
    "mistral-list": "{{ tools }}[TOOL_CALLS][",
    "deepseek": "{{ tools }}<｜tool▁calls▁begin｜>",
    "llama3": "<|start_header_id|>{% if tools %}{{ tools }}{% endif %}",
    "gemma4": "{% if tools %}<|tool_call>call:{% endif %}",
    "function-gemma": "{% if tools %}<start_function_call>{% endif %}",
    "plain": "{% for tool in tools %}[AVAILABLE_TOOLS]{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_dialects_by_template(name):
    dialect = dialect_of(TEMPLATES[name])
    assert dialect.name == name
    assert dialect.prepared is None


def test_a_template_without_tools_has_them_told_as_text():
    assert dialect_of("{% for m in messages %}{{ m.content }}{% endfor %}").prepared is not None


def test_a_template_that_knows_calls_keeps_them():
    [message] = dialect_of("{{ m.tool_calls }}").prepared([{"role": "tool", "content": "x"}], [])
    assert message == {"role": "tool", "content": "x"}


def test_reasoning():
    assert reasoning_of("{{ '<think>' }}{{ '</think>' }}") == ("<think>", "</think>")
    assert reasoning_of("content.split('</think>')[-1]") == ("<think>", "</think>")
    assert reasoning_of("nothing") is None


def test_a_distilled_model_is_told_of_tools_and_keeps_its_own_calls():
    dialect = dialect_of("{{ m.tool_calls }}<｜tool▁calls▁begin｜>")
    assert dialect.name == "deepseek"
    assert dialect.prepared is not None
