"""Records of what clients send, field by field: what /openapi.json says of requests.

The fields are read and checked elsewhere (options.py, schema.py and their neighbours), with
messages that no generated check would give; a test throws at the server what these records allow
and what they forbid.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from voltapile.gateway.api.options import MAX_BIAS, MAX_CHOICES, MAX_STOP_LENGTH, MAX_STOPS
from voltapile.workers.protocol import MAX_LOGPROBS

Count = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
TokenId = Annotated[int, Meta(ge=0)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None
Limit = Annotated[
    int, Meta(ge=-1, description="Most tokens of the answer; -1: until the context's end.")
]


def _one_of(*schemas: dict[str, Any]) -> Meta:
    return Meta(extra_json_schema={"anyOf": [*schemas]})


_TEXT: dict[str, Any] = {"type": "string"}
_ID: dict[str, Any] = {"type": "integer", "minimum": 0}
_IDS: dict[str, Any] = {"type": "array", "items": _ID, "minItems": 1}
_NULL: dict[str, Any] = {"type": "null"}


def _several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


Prompt = Annotated[Any, _one_of(_TEXT, _IDS, _several(_TEXT), _several(_IDS))]
_MIXED = {"type": "array", "items": {"anyOf": [_TEXT, _ID]}, "minItems": 1}
NativePrompt = Annotated[Any, _one_of(_TEXT, _MIXED, _several({"anyOf": [_TEXT, _MIXED]}))]
_BIAS = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
_PAIR = {"type": "array", "minItems": 2, "maxItems": 2}
_BY_ID = {"type": "object", "additionalProperties": _BIAS}
Bias = Annotated[Any, _one_of(_BY_ID, {"type": "array", "items": _PAIR}, _NULL)]


Penalised = Annotated[float, Meta(gt=0, le=100)] | None
Some = Annotated[str, Meta(min_length=1)] | None
Thought = Annotated[int, Meta(ge=-1, description="Tokens of reasoning; -1: any number.")] | None


class StructuredOutputs(Struct):
    """vLLM's; only one of them may be given."""

    json: str | dict[str, Any] | None = None
    regex: Some = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: Some = None
    json_object: bool | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(Struct, kw_only=True):
    """What all generating routes take. Absent and null are the same; unknown fields are ignored."""

    model: Annotated[str, Meta(description="Any name: one model is served.")] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, description="0 and -1: all")] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(description="-1: a random one")] | None = None
    stream: bool | None = None
    cache_prompt: Annotated[bool, Meta(description="false: compute it anew")] | None = None
    ignore_eos: bool | None = None


class Shaped(Sampled, kw_only=True):
    """What OpenAI's routes and llama-server's own take under one name."""

    stop: Stops = None
    stop_sequences: Stops = None
    stop_token_ids: list[TokenId] | None = None
    samplers: Annotated[list[str] | str, Meta(description="in an order that is obeyed")] | None = (
        None
    )
    repeat_penalty: Penalised = None
    repetition_penalty: Penalised = None
    repeat_last_n: Annotated[int, Meta(ge=-1, description="-1: all tokens")] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias = None
    grammar: Annotated[str, Meta(description="GBNF, or llguidance's Lark")] | None = None
    json_schema: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: Some = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: Some = None
    structured_outputs: StructuredOutputs | None = None
    reasoning_budget: Thought = None
    thinking_budget_tokens: Thought = None
    thinking_token_budget: Thought = None


class Generating(Shaped, kw_only=True):
    """And what /v1/responses calls otherwise, or has not."""

    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="only as n")] | None = None
    stream_options: StreamOptions | None = None
    n_predict: Limit | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    response_format: dict[str, Any] | None = None


class OpenAi(Generating, kw_only=True):
    """What both of OpenAI's generating routes take, and what changes nothing there."""

    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None


class TextPart(Struct):
    type: Literal["text"]
    text: str


class Message(Struct):
    """content may be absent in the assistant's, beside tool_calls."""

    role: Annotated[str, Meta(min_length=1)]
    content: str | list[TextPart] | None = None


class ChatBody(OpenAi, kw_only=True):
    """The last messages's answer, through the model's chat template."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[Count, Meta(description="needs logprobs")] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning_format: Literal["auto", "deepseek", "deepseek-legacy", "none"] | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[Any], Meta(description="for the template")] | None = None


class ResponsesBody(Shaped, kw_only=True):
    """OpenAI's newer form of a chat; nothing is stored."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    truncation: Annotated[
        Literal["auto", "disabled"], Meta(description="nothing is ever cut: too much is a 400")
    ] | None = None  # fmt: skip
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(OpenAi, kw_only=True):
    """Texts or token ids that the model goes on from."""

    prompt: Prompt
    suffix: Annotated[str, Meta(description="what comes behind the answer")] | None = None
    echo: Annotated[bool, Meta(description="the prompt begins the text")] | None = None
    logprobs: Count | Literal[False] | None = None


class NativeBody(Generating, kw_only=True):
    """llama-server's own; a list of prompts gives a list of answers."""

    prompt: NativePrompt
    n_probs: Count | None = None
    response_fields: list[str] | None = None


class OtherFile(Struct):
    text: str
    filename: str | None = None


class InfillBody(Generating, kw_only=True):
    """llama-server's; the answer is /completion's."""

    input_prefix: str
    input_suffix: str
    input_extra: list[OtherFile] | None = None
    prompt: Annotated[str, Meta(description="the answer's first words")] | None = None
    n_probs: Count | None = None


class EmbeddingsBody(Struct, kw_only=True):
    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None


class EmbeddingBody(Struct, kw_only=True):
    """llama-server's; content or input."""

    content: Prompt = None
    input: Prompt = None
    embd_normalize: Literal[2] | None = None


class AnthropicMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class MessagesBody(Sampled, kw_only=True):
    """Anthropic's, also to count tokens."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    max_tokens: Limit | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Struct):
    """One of the first three: llama-server's text, or vLLM's text or chat."""

    content: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: Annotated[bool, Meta(description="beside prompt")] | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Struct):
    tokens: list[TokenId]
