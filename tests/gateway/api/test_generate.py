import asyncio

import pytest
from voltapile.gateway.api.echo import Echo
from voltapile.gateway.api.errors import ApiError
from voltapile.gateway.api.generate import Generation, started, usage
from voltapile.gateway.api.options import Options
from voltapile.gateway.api.services import Services
from voltapile.gateway.grammar import Grammars
from voltapile.gateway.metrics import Metrics
from voltapile.gateway.request import Chunk

END = 257


@pytest.fixture
def services(engine, tokenizer, template, plan):
    metrics = Metrics(engine.stats)
    return Services(
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        plan=plan,
        metrics=metrics,
        grammars=Grammars(tokenizer),
    )


@pytest.fixture
def start(services):
    def make(prompt=(65, 66), index=0, echo=None, **options):
        options = {"max_tokens": None} | options
        return Generation(services, list(prompt), Options(**options), index, echo)

    return make


async def test_text_comes_in_pieces(start):
    generation = start()
    deltas = [delta async for delta in generation]
    assert [d.text for d in deltas] == ["H", "e", "l", "l", "o", ""]
    assert [d.is_first for d in deltas] == [True] + [False] * 5
    assert deltas[-1].finish == "stop"
    assert deltas[-1].tokens == [END]
    assert usage([generation]) == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_a_character_over_several_tokens_comes_whole(start, engine):
    engine.say("é😀!")
    assert [d.text for d in [d async for d in start()] if d.text] == ["é", "😀", "!"]


async def test_an_unfinished_character_ends_as_a_replacement(start, engine):
    engine.say(b"a" + "😀".encode()[:2], finish="length")
    outcome = await start().whole()
    assert outcome.text.startswith("a\ufffd")
    assert outcome.finish == "length"


async def test_a_stop_string_over_token_borders(start, engine):
    engine.say("one STOP two")
    generation = start(stop=["STOP", "never"])
    outcome = await generation.whole()
    assert (outcome.text, outcome.finish) == ("one ", "stop")
    assert generation.completion_tokens == len("one STOP")
    assert engine.streams[0].cancelled.is_set()


async def test_tokens_after_a_stop_string_in_one_chunk_do_not_count(start, engine):
    engine.script = [Chunk(list(b"ab#cd")), Chunk([END], finish="stop")]
    outcome = await start(stop=["#"]).whole()
    assert (outcome.text, outcome.tokens) == ("ab", list(b"ab#"))


async def test_a_held_back_start_of_a_stop_string_is_shown_at_the_end(start, engine):
    engine.say("x ST")
    assert (await start(stop=["STOP"]).whole()).text == "x ST"


async def test_several_tokens_in_a_chunk_are_one_delta(start, engine):
    engine.script = [Chunk(list(b"abc")), Chunk([*b"de", END], finish="stop")]
    assert [d.text async for d in start()] == ["abc", "de"]


async def test_the_echo_comes_first_and_once(start, engine, tokenizer):
    engine.script = [Chunk(), *engine.script]
    assert (await start(echo=Echo(tokenizer, ">> ", [65])).whole()).text == ">> Hello"


async def test_nothing_beside_the_echo(start, engine, tokenizer):
    generation = start(echo=Echo(tokenizer, "AB", [65, 66]), max_tokens=0)
    outcome = await generation.whole()
    assert (outcome.text, outcome.tokens, outcome.finish) == ("AB", [], "length")
    assert generation.completion_tokens == 0
    assert engine.sampling[0].max_position == 3  # the engine does not go without a token


async def test_the_engine_gets_limits_and_stop_ids(start, engine, plan):
    start(max_tokens=5, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7)
    start(max_tokens=10**9, ignore_eos=True)
    first, second = engine.sampling
    assert (first.max_position, first.stop_ids) == (7, [END])
    assert (first.temperature, first.top_k, first.top_p, first.min_p) == (0.5, 3, 0.9, 0.1)
    assert first.seed == 7
    assert engine.wants == [None, None]
    assert (second.max_position, second.stop_ids) == (plan.context, [])


async def test_an_engine_error_is_raised(start, engine):
    engine.script[2:] = [Chunk(finish="error", error="rank 0: layer 3 is not finite")]
    with pytest.raises(ApiError, match="layer 3") as caught:
        await start().whole()
    assert caught.value.status == 500


@pytest.mark.parametrize("end", [[], [Chunk(finish="cancelled")]])
async def test_a_stream_that_ends_early_is_an_error(start, engine, end):
    engine.script[2:] = end
    with pytest.raises(ApiError) as caught:
        await start().whole()
    assert caught.value.status == 503


async def test_an_interruption_wakes_the_reader(start, engine):
    engine.say("abc", finish="")
    generation = start()
    reading = asyncio.create_task(generation.whole())
    await asyncio.sleep(0.01)
    generation.interrupt()
    with pytest.raises(ApiError, match="stopping"):
        await reading


async def test_closing_frees_the_engine_once(start, services, engine):
    generation = start()
    assert generation in services.live
    generation.close()
    generation.close()
    assert not services.live
    assert engine.streams[0].cancelled.is_set()
    assert b'voltapile_generations_total{finish="cancelled"} 1.0' in services.metrics.render()


async def test_timings(start):
    generation = start()
    await generation.whole()
    timings = generation.timings()
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (1, 1, 6)
    assert timings["predicted_ms"] >= 0


async def test_timings_of_tokens_that_came_together(start, engine):
    """As they come to a gateway that was busy."""
    engine.script = [Chunk(list(b"Hell"), seconds=0.3), Chunk([END], "stop", seconds=0.1)]
    generation = start()
    await generation.whole()
    timings = generation.timings()
    assert timings["predicted_ms"] == pytest.approx(400)
    assert timings["predicted_per_second"] == pytest.approx(4 / 0.4)
    assert timings["prompt_ms"] >= 0


async def test_a_listener_takes_in_the_engines_own_call(start, engine):
    engine.script = [Chunk([72]), Chunk(list(b"ell")), 0.01, Chunk([111]), Chunk([END], "stop")]
    generation, deltas = start(), []
    generation.listen(lambda: deltas.append(generation.take()))
    while not generation.finish:
        assert generation.take() is None, "what came was not taken at once"
        await asyncio.sleep(0)
    assert [delta.text for delta in deltas] == ["H", "ell", "o", ""]


async def test_penalties_and_biases_reach_the_engine(start, engine):
    start(
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={3: 1.5},
        logprobs=4,
    )
    [sampling] = engine.sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.1, 0.5)
    assert (sampling.frequency_penalty, sampling.logit_bias) == (-0.5, {3: 1.5})
    assert engine.wants[0].logprobs == 4


async def test_choices_of_a_prompt_have_seeds_in_a_row(services, engine):
    options = Options(max_tokens=3, n=3, seed=2**64 - 2)
    generations = started(services, [[1, 2], [3]], options, "me")
    assert [sampling.seed for sampling in engine.sampling] == [2**64 - 2, 2**64 - 1, 0] * 2
    assert engine.prompts == [[1, 2]] * 3 + [[3]] * 3
    assert engine.clients == ["me"] * 6
    assert [generation.index for generation in generations] == list(range(6))
    for generation in generations:
        await generation.whole()
    assert usage(generations)["prompt_tokens"] == 3
    assert usage(generations)["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage(generations)["completion_tokens"] == 6 * 6


async def test_no_choice_runs_if_one_is_refused(services, engine):
    submit = engine.submit

    def third_fails(*args):
        if len(engine.prompts) == 2:
            raise RuntimeError("no")
        return submit(*args)

    engine.submit = third_fails
    with pytest.raises(RuntimeError):
        started(services, [[1]], Options(max_tokens=3, n=3), "me")
    assert all(stream.cancelled.is_set() for stream in engine.streams)
    assert not services.live
