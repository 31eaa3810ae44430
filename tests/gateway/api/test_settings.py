from voltapile.gateway.api.options import NEVER, Options
from voltapile.gateway.api.settings import generation_settings
from voltapile.workers.protocol import Sampling


def test_names_are_llama_servers():
    sampling = Sampling(temperature=0.5, logit_bias={3: NEVER, 4: 1.5}, max_position=30)
    found = generation_settings(sampling, Options(max_tokens=20, stop=["x"], logprobs=2), 10)
    assert (found["temperature"], found["n_predict"], found["stop"]) == (0.5, 20, ["x"])
    assert found["logit_bias"] == [{"token": 3, "bias": None}, {"token": 4, "bias": 1.5}]
    assert (found["repeat_last_n"], found["n_probs"], found["ignore_eos"]) == (-1, 2, False)


def test_no_limit():
    assert generation_settings(Sampling(), Options(max_tokens=None), 0)["n_predict"] == -1
