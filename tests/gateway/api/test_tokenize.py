import pytest


async def test_round_trip(post):
    assert await post("/tokenize", {"content": "a<|im_end|>"}) == (200, {"tokens": [97, 257]})
    assert await post("/detokenize", {"tokens": [97, 257]}) == (200, {"content": "a<|im_end|>"})


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
