"""What Steps will take, learnt from a machine that behaves as the formula says."""

import random
from math import inf

import pytest
from voltapile.gateway.costs import Costs, Load


def seconds(load: Load, base: float = 0.02, token: float = 1e-4, position: float = 1e-8) -> float:
    return base + token * load.tokens + position * load.positions


def chunk(start: int, end: int, decodes: int = 1) -> Load:
    load = Load(decodes)
    load.add(start, end)
    return load


def test_nothing_is_known_at_first() -> None:
    costs = Costs()
    assert costs.base(3) == 0.0
    assert costs.piece(0, 64) == inf
    costs.observe(Load(2), 0.0)
    assert costs.base(2) == 0.0


def test_a_decode_takes_what_it_took_with_about_as_many() -> None:
    costs = Costs()
    costs.observe(Load(1), 0.01)
    costs.observe(Load(8), 0.03)
    assert [costs.base(n) for n in (0, 1, 2, 6, 9)] == [0.0, 0.01, 0.01, 0.03, 0.03]
    for _ in range(20):
        costs.observe(Load(1), 0.05)
    assert costs.base(1) == pytest.approx(0.05, rel=0.01)


def test_tokens_and_positions_are_told_apart() -> None:
    costs, rng = Costs(), random.Random(1)
    costs.observe(Load(1), 0.02)
    for start in range(0, 30_000, 512):
        load = chunk(start, start + rng.randrange(64, 513))
        costs.observe(load, seconds(load) * rng.uniform(0.97, 1.03))
    for start, end in ((0, 512), (30_000, 30_512), (60_000, 60_064)):
        expected = seconds(chunk(start, end)) - 0.02
        assert costs.piece(start, end) == pytest.approx(expected, rel=0.2)
    assert costs.widest <= 512


def test_a_slow_first_step_is_forgotten() -> None:
    costs = Costs()
    costs.observe(Load(1), 0.02)
    costs.observe(chunk(0, 64), 3.0)
    for _ in range(30):
        load = chunk(0, 256)
        costs.observe(load, seconds(load))
    assert costs.piece(0, 256) == pytest.approx(seconds(chunk(0, 256)) - 0.02, rel=0.05)


def test_no_price_is_negative() -> None:
    costs, rng = Costs(), random.Random(2)
    for _ in range(500):
        start = rng.randrange(10_000)
        costs.observe(chunk(start, start + rng.randrange(1, 600)), rng.random())
        assert 0.0 <= costs.piece(0, 64) <= costs.piece(9000, 9064) < inf
