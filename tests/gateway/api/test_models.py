import anthropic
import pytest


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_the_model_is_listed(client, prefix, plan):
    async with client.get(f"{prefix}/models") as response:
        body = await response.json()
    assert body["object"] == "list"
    [model] = body["data"]
    assert (model["id"], model["object"]) == ("tiny/model", "model")
    assert model["meta"]["n_ctx"] == model["max_model_len"] == plan.context
    async with client.get(f"{prefix}/models/tiny/model") as response:
        assert await response.json() == model


async def test_anthropics_client_lists_it_too(client, plan):
    url = str(client._base_url)
    async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as api:
        [model] = [each async for each in api.models.list()]
        assert (model.type, model.display_name) == ("model", "tiny/model")
        assert model.max_input_tokens == plan.context - 1
        assert model.created_at.year > 2000
        assert await api.models.retrieve("tiny/model") == model


async def test_another_model_is_not_found(client):
    async with client.get("/v1/models/gpt-4") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"
