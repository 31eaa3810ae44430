"""Grammars, forced calls and budgets over the real engine, with a worker that chooses at random
among what a mask allows; and what bad schemas get."""

import asyncio
import contextlib
import json
import random

import aiohttp
import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from voltapile.gateway.api.app import listening, make_app
from voltapile.gateway.engine import Engine
from voltapile.gateway.template import ChatTemplate
from voltapile.topology.plan import CacheGroup, RankPlan, plan_id
from voltapile.topology.share import Share
from voltapile.workers.protocol import Ready, Result, Sampled, Step, Stop, decode, encode

PATH = "/v1/chat/completions"
SOURCE = (
    "{% if tools %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.content }};{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"], "additionalProperties": False}}}
    for name in ("look", "stop")
]  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "é"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
BODY = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 200,
    "enable_thinking": False,
}
END = 257


class Chooser:
    """A worker. Free rows say "z"; bound ones what they must, or anything that they may."""

    def __init__(self, plan):
        self.plan, self.random = plan, random.Random(3)
        self.known, self.sampling, self.finish = {}, {}, {}
        self.bound = self.steps = 0

    async def run(self, socket):
        await socket.send_multipart(encode(Ready(name="text-0", plan=self.plan.id)))
        while not isinstance(step := decode(await socket.recv_multipart()), Stop):
            if isinstance(step, Step):  # a Hold comes too late for who answers at once
                for result in self.answers(step):
                    await socket.send_multipart(encode(result))

    def answers(self, step):
        """A Result for each round, up to the one in which a row ends."""
        self.steps += 1
        for slot in step.release:
            self.finish.pop(slot, None)
        asked = [row for row in step.rows if self.take(row)]
        for left in reversed(range(step.rounds)):
            rows = [self.sampled(row) for row in asked]
            is_last = any(row.finish or not row.tokens for row in rows)
            yield Result(id=step.id, rows=rows, left=0 if is_last else left)
            if is_last:
                return

    def take(self, row):
        if row.sampling is not None:
            self.known[row.slot], self.sampling[row.slot] = 0, row.sampling
            self.finish.pop(row.slot, None)
        self.known[row.slot] += len(row.tokens)
        return row.sample

    def sampled(self, row):
        if self.finish.get(row.slot):
            return Sampled(slot=row.slot)
        token = ord("z")
        if row.forced >= 0:
            token = row.forced
        elif row.mask is not None:
            bits = np.unpackbits(row.mask.view(np.uint8), bitorder="little")
            token = int(self.random.choice(np.flatnonzero(bits)))
        self.bound += row.mask is not None or row.forced >= 0
        self.known[row.slot] += 1
        sampling = self.sampling[row.slot]
        is_last = self.known[row.slot] >= sampling.max_position
        finish = "stop" if token in sampling.stop_ids else "length" if is_last else ""
        self.finish[row.slot] = finish
        return Sampled(slot=row.slot, tokens=[token], finish=finish)


@pytest.fixture(scope="module")
def template():
    made = ChatTemplate(SOURCE)
    yield made
    made.close()


@pytest.fixture
def real_plan(plan, tmp_path):
    share = Share(layers=[0], heads=(0, 1), kv_heads=(0, 1), head_map=[0], ffn=(0, 1), vocab=(0, 1))
    cache = CacheGroup(
        kind="full", layers=[0], kv_heads=1, key_dim=8, value_dim=8, window=0, key_type="f16",
        value_type="f16", page_tokens=4, page_bytes=1, pages=400,
    )  # fmt: skip
    rank = RankPlan(
        rank=0, device="cpu", node=0, cpus=[0], threads=1, memory={}, mapped_bytes=0,
        share=share, page_bytes=[1],
    )  # fmt: skip
    bare = msgspec.structs.replace(
        plan, endpoint=f"ipc://{tmp_path}/s", batch_tokens=128, ranks=[rank], caches=[cache]
    )
    return msgspec.structs.replace(bare, id=plan_id(bare))


@pytest.fixture
async def worker(real_plan):
    return Chooser(real_plan)


@pytest.fixture
async def post(real_plan, worker, tokenizer, template):
    """await post(body, path) -> (status, JSON)."""
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(real_plan))
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, linger=0)
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, b"text-0")
        socket.connect(real_plan.endpoint)
        running = asyncio.create_task(worker.run(socket))
        stack.callback(running.cancel)
        app = make_app(engine, tokenizer, template, real_plan)
        url = await stack.enter_async_context(listening(app, "127.0.0.1", 0))
        session = await stack.enter_async_context(aiohttp.ClientSession(url))
        while engine.health.status != "ok":
            await asyncio.sleep(0.01)

        async def send(body, path=PATH):
            async with session.post(path, json=body) as response:
                return response.status, await response.json()

        yield send


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": schema_format(SCHEMA)},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
async def test_an_answer_of_a_schema(post, worker, given):
    status, body = await post(BODY | given | {"n": 3})
    assert status == 200
    assert body["usage"]["completion_tokens"] == worker.bound
    for choice in body["choices"]:
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["message"]["content"])
        assert value["b"] in ("x", "é")
        assert isinstance(value["a"], bool)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}),
        ({"guided_choice": ["a", "b"]}, {"a", "b"}),
        ({"guided_regex": "q{3}"}, {"qqq"}),
        ({"grammar": 'root ::= "\\u00e9" | "\\U000000e9"\r\n'}, {"é"}),
        ({"json_schema": {"oneOf": [{"const": 1}, {"const": 2}]}}, {"1", "2"}),
    ],
)
async def test_other_forms(post, given, texts):
    for path, body in ((PATH, BODY), ("/v1/completions", {"prompt": "x", "max_tokens": 50})):
        status, answer = await post(body | given, path)
        assert status == 200
        choice = answer["choices"][0]
        assert (choice.get("text") or choice["message"]["content"]) in texts


async def test_an_enum_of_thousands_is_compiled_in_time(post):
    schema = {"enum": [f"value {n}" for n in range(2000)]}
    status, body = await asyncio.wait_for(post(BODY | {"json_schema": schema}), 20)
    assert status == 200
    assert json.loads(body["choices"][0]["message"]["content"]) in schema["enum"]


async def test_a_grammar_that_becomes_too_complex_is_the_clients_fault(post):
    """Found when the answer has begun: it is the request's own end, and no other's."""
    wide = " | ".join(f'"a" "b{n}"' for n in range(2100))  # more than llguidance has room for
    asked = BODY | {"grammar": f'start: ("x" | "y") ({wide})'}
    free = post({"prompt": "x", "max_tokens": 50}, "/v1/completions")
    (status, body), (other, _) = await asyncio.gather(post(asked), free)
    assert (status, other) == (400, 200)
    assert (body["error"]["param"], body["error"]["code"]) == ("grammar", "invalid_schema")
    assert "max is 2000" in body["error"]["message"]
    assert "\n" not in body["error"]["message"]


async def test_free_and_bound_answers_at_once(post):
    free = BODY | {"max_tokens": 40}
    answers = await asyncio.gather(*(post(b) for b in (free, BODY | {"json_schema": SCHEMA}, free)))
    texts = [answer["choices"][0]["message"]["content"] for _, answer in answers]
    assert texts[0] == texts[2] == "z" * 40
    json.loads(texts[1])


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"look", "stop"}),
     ({"type": "function", "function": {"name": "stop"}}, {"stop"})],
)  # fmt: skip
async def test_forced_calls(post, choice, names):
    status, body = await post(BODY | {"tools": TOOLS, "tool_choice": choice, "max_tokens": 230,
                                      "parallel_tool_calls": False})  # fmt: skip
    assert status == 200
    [answer] = body["choices"]
    assert answer["finish_reason"] == "tool_calls"
    [call] = answer["message"]["tool_calls"]
    assert call["function"]["name"] in names
    assert 0 <= json.loads(call["function"]["arguments"])["n"] <= 99


async def test_reasoning_before_a_bound_answer_is_free(post):
    given = {"json_schema": SCHEMA, "enable_thinking": True, "reasoning_budget": 12}
    status, body = await post(BODY | given)
    assert status == 200
    [choice] = body["choices"]
    assert choice["finish_reason"] == "stop"
    json.loads(choice["message"]["content"])
    assert 12 <= body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 24


async def test_reasoning_before_a_forced_call_is_free(post):
    given = {"tools": TOOLS, "tool_choice": "required", "enable_thinking": True,
             "reasoning_budget": 9, "parallel_tool_calls": False}  # fmt: skip
    status, body = await post(BODY | given)
    assert status == 200
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert 0 <= json.loads(call["function"]["arguments"])["n"] <= 99
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 9


@pytest.mark.parametrize(
    ("given", "finish"), [({"max_tokens": 5}, "length"), ({"stop": ['"a"']}, "stop")]
)
async def test_a_bound_answer_may_be_cut_and_stopped(post, given, finish):
    _, body = await post(BODY | {"response_format": schema_format(SCHEMA)} | given)
    [choice] = body["choices"]
    assert choice["finish_reason"] == finish
    assert choice["message"]["content"].lstrip()[:1] in ("", "{")
    assert '"a"' not in choice["message"]["content"] or finish == "length"


@pytest.mark.parametrize("budget", [1, 2, 7])
async def test_a_budget_ends_the_reasoning(post, worker, budget):
    given = {"enable_thinking": True, "reasoning_budget": budget, "max_tokens": budget + 12}
    _, body = await post(BODY | given)
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == "z" * budget
    assert message["content"] == "z" * 4
    assert worker.bound == len("</think>")


async def test_no_budget_is_no_reasoning(post, worker):
    bare = {"messages": BODY["messages"], "reasoning_budget": 0, "max_tokens": 5}
    _, body = await post(bare)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "zzzzz"}
    assert worker.bound == 0


LOOP = {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}


@pytest.mark.parametrize(
    ("given", "param", "word"),
    [
        ({"json_schema": {"type": "string", "pattern": "(a"}}, "json_schema", "'pattern'"),
        ({"json_schema": {"not": {}}}, "json_schema", "'not'"),
        ({"json_schema": LOOP}, "json_schema", "'$ref'"),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "json_schema", "nsat"),
        ({"response_format": schema_format({"oneOf": 3})},
         "response_format.json_schema.schema", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": "json"}, "response_format", "object"),
        ({"grammar": "root ::= ("}, "grammar", ""),
        ({"grammar": 'root ::= root "a"'}, "grammar", "has an end"),
        ({"json_schema": {"$ref": "https://example.com/x.json"}}, "json_schema", "'$ref'"),
        ({"json_schema": {"$ref": "#/$defs/none"}}, "json_schema", "'$ref'"),
        ({"grammar": 3}, "grammar", "string"),
        ({"grammar": 'root ::= "a" root'}, "grammar", "too long"),
        ({"guided_choice": [1]}, "guided_choice", "strings"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ""),
        ({"guided_regex": "(a"}, "guided_regex", ""),
        ({"grammar": 'root ::= "a"', "json_schema": SCHEMA}, "grammar", "at once"),
        ({"tools": TOOLS, "tool_choice": "required", "json_schema": SCHEMA}, "json_schema", "call"),
        ({"reasoning_budget": -2}, "reasoning_budget", "at least 0"),
    ],
)  # fmt: skip
async def test_bad_input_is_named(post, worker, given, param, word):
    status, body = await post(BODY | given)
    assert (status, body["error"]["param"]) == (400, param)
    assert word in body["error"]["message"]
    assert not worker.steps


async def test_a_tool_whose_schema_cannot_be_compiled(post):
    for parameters, word in (({"not": {}}, "'not'"), ({"properties": {"a": LOOP}} | LOOP, "$ref")):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        given = {"tools": [*TOOLS, tool], "tool_choice": "required"}
        status, body = await post(BODY | given)
        assert (status, body["error"]["param"]) == (400, "tools")
        assert f"the parameters of 'f': the keyword {word}" in body["error"]["message"].replace(
            "'$ref'", "$ref"
        )


@pytest.mark.parametrize(
    "given", [{"json_schema": {}, "max_tokens": 20}, {"structured_outputs": {"json_object": True}}]
)
async def test_any_json(post, worker, given):
    status, body = await post(BODY | given)
    assert status == 200
    assert worker.bound == body["usage"]["completion_tokens"]


async def test_arguments_are_an_object_where_a_schema_does_not_say_so(post):
    parameters = {"properties": {"n": {"const": 7}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    _, body = await post(BODY | {"tools": [tool], "tool_choice": "required"})
    [call] = body["choices"][0]["message"]["tool_calls"][:1]
    assert call["function"]["arguments"].startswith('{"')


ASKED = {"messages": BODY["messages"], "max_tokens": 200}
OWN = [
    {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}
    for each in TOOLS
]


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"look", "stop"}), ({"type": "tool", "name": "stop"}, {"stop"})],
)
async def test_a_call_that_anthropics_clients_force(post, choice, names):
    given = {"tools": OWN, "tool_choice": choice | {"disable_parallel_tool_use": True}}
    status, body = await post(ASKED | given, "/v1/messages")
    assert (status, body["stop_reason"]) == (200, "tool_use")
    [block] = body["content"]
    assert block["name"] in names
    assert 0 <= block["input"]["n"] <= 99


async def test_a_schema_of_anthropics_clients(post):
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    status, body = await post(ASKED | {"output_config": config}, "/v1/messages")
    assert status == 200
    assert json.loads(body["content"][0]["text"])["b"] in ("x", "é")
    config["format"]["type"] = "xml"
    assert (await post(ASKED | {"output_config": config}, "/v1/messages"))[0] == 400


async def test_a_budget_of_anthropics_clients(post):
    thinking = {"type": "enabled", "budget_tokens": 7}
    status, body = await post(ASKED | {"thinking": thinking}, "/v1/messages")
    assert status == 200
    first, second = body["content"]
    assert (first["type"], first["thinking"]) == ("thinking", "z" * 7)
    assert set(second["text"]) == {"z"}
    thinking["budget_tokens"] = "many"
    assert (await post(ASKED | {"thinking": thinking}, "/v1/messages"))[0] == 400
