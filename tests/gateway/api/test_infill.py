"""/infill as editors ask, and the suffix of OpenAI's completions."""

import pytest

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
PREFIX, SUFFIX, MIDDLE = 258, 259, 260
BODY = {"input_prefix": "a", "input_suffix": "b"}
BEST = {"prompt": "a", "suffix": "b"}
FAR_TOO_LONG = "a" * 70_000  # found out by its beginning


class TestOfModelsThatFillGaps:
    @pytest.fixture
    def tokenizer(self, make_tokenizer):
        return make_tokenizer("<|im_start|>", "<|im_end|>", *FIM)

    async def test_an_answer(self, post, engine):
        status, body = await post("/infill", BODY | {"prompt": "c", "n_predict": 9})
        assert (status, body["content"], body["stop_type"]) == (200, "Hello", "eos")
        assert engine.prompts == [[PREFIX, 97, SUFFIX, 98, MIDDLE, 99]]
        assert engine.sampling[0].stop_ids == [257, PREFIX, SUFFIX, MIDDLE]
        assert engine.sampling[0].temperature == 0.8

    async def test_other_files(self, post, engine):
        extra = [{"filename": "x", "text": "1" * 400}, {"text": "2"}]
        assert (await post("/infill", BODY | {"input_extra": extra}))[0] == 200
        [prompt] = engine.prompts
        assert prompt[-5:] == [PREFIX, 97, SUFFIX, 98, MIDDLE]
        assert len(prompt) == 255 - 256 // 4, "the answer has room"

    async def test_a_suffix(self, post, engine):
        status, body = await post("/v1/completions", BEST | {"n": 2})
        assert (status, len(body["choices"])) == (200, 2)
        assert engine.prompts == [[PREFIX, 97, SUFFIX, 98, MIDDLE]] * 2

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/infill", {"input_suffix": "b"}, "input_prefix"),
            ("/infill", {"input_prefix": "a", "input_suffix": 5}, "input_suffix"),
            ("/infill", BODY | {"input_extra": {}}, "input_extra"),
            ("/infill", BODY | {"input_extra": [5]}, "input_extra[0]"),
            ("/infill", BODY | {"input_extra": [{"filename": "x"}]}, "input_extra[0].text"),
            ("/infill", BODY | {"prompt": []}, "prompt"),
            ("/infill", BODY | {"n_predict": "5"}, "n_predict"),
            ("/infill", BODY | {"input_prefix": "a" * 300}, "prompt"),
            ("/infill", BODY | {"input_prefix": FAR_TOO_LONG}, "input_prefix"),
            ("/infill", BODY | {"input_suffix": FAR_TOO_LONG}, "input_suffix"),
            ("/infill", BODY | {"prompt": FAR_TOO_LONG}, "prompt"),
            ("/v1/completions", BEST | {"suffix": FAR_TOO_LONG}, "suffix"),
            ("/v1/completions", BEST | {"suffix": 5}, "suffix"),
            ("/v1/completions", BEST | {"echo": True}, "suffix"),
            ("/v1/completions", BEST | {"prompt": [97]}, "suffix"),
        ],
    )
    async def test_bad_bodies(self, post, path, body, param):
        status, answer = await post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("path", "body"), [("/infill", BODY), ("/v1/completions", BEST)])
async def test_other_models_refuse(post, engine, path, body):
    status, answer = await post(path, body)
    assert (status, answer["error"]["code"]) == (400, "not_supported")
    assert engine.prompts == []
