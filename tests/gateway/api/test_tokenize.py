import pytest


async def test_round_trip(post):
    found = {"tokens": [97, 257], "count": 2, "max_model_len": 256}
    assert await post("/tokenize", {"content": "a<|im_end|>"}) == (200, found)
    text = dict.fromkeys(("content", "prompt"), "a<|im_end|>")
    assert await post("/detokenize", {"tokens": [97, 257]}) == (200, text)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "a<|im_end|>"}, "a<|im_end|>"),
        ({"messages": [{"role": "user", "content": "a"}]},
         "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"),
    ],
)  # fmt: skip
async def test_as_vllm(post, body, text):
    status, found = await post("/tokenize", body)
    assert (status, found["count"]) == (200, len(found["tokens"]))
    _, back = await post("/detokenize", {"tokens": found["tokens"]})
    assert back["prompt"] == text


async def test_special_tokens_may_stay_text(post):
    _, body = await post("/tokenize", {"content": "<|im_end|>", "parse_special": False})
    assert body["tokens"] == [*b"<|im_end|>"]


async def test_pieces(post):
    _, body = await post("/tokenize", {"content": "aé", "with_pieces": True})
    assert body["tokens"] == [
        {"id": 97, "piece": "a"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
    ]


async def test_a_long_text(post):
    _, body = await post("/tokenize", {"content": "ab" * 20_000})
    assert len(body["tokens"]) == 40_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": "a", "add_special": 1}, "add_special"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"messages": 5}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "ab"}, "tokens"),
        ("/detokenize", {"tokens": [1, 258]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
async def test_bad_bodies(post, path, body, param):
    status, answer = await post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_a_text_that_is_too_long(post):
    status, body = await post("/tokenize", b'{"content": "%s"}' % (b"x" * ((4 << 20) + 1)))
    assert status == 400
    assert body["error"]["param"] == "content"
