"""What a product asks the cache for: parts of the next gate's up, and nothing beside them."""

from __future__ import annotations

from voltapile.kernels.cuda.following import NOTHING, Following, Span

QKV, OUT, GATE, DOWN, MOST = 100, 200, 300, 400, 264
UP = Span(1 << 20, 16 * 2304, 768)


def asked(up: Span = UP, layers: int = 1) -> list[Span]:
    """By the products of the second step, in which the order is known."""
    following, found = Following(), []
    for step in range(2):
        for layer in range(layers):
            for key, own in ((QKV, NOTHING), (OUT, NOTHING), (GATE, up), (DOWN, NOTHING)):
                span = following.after(key + 1000 * layer, own, MOST)
                if step:
                    found.append(span)
    return found


def test_the_two_products_before_a_gate_ask_for_its_up() -> None:
    first, second, *others = asked()
    assert first == Span(UP.address, UP.size, MOST)
    assert second == Span(UP.address + MOST * UP.size, UP.size, MOST)
    assert others == [NOTHING, NOTHING]
    assert [each.units > 0 for each in asked(layers=2)] == [True, True, False, False] * 2


def test_no_more_than_there_is() -> None:
    small = Span(UP.address, UP.size, MOST + 10)
    assert [each.units for each in asked(small)] == [MOST, 10, 0, 0]
    assert [each.units for each in asked(Span(UP.address, UP.size, 20))] == [20, 0, 0, 0]
    assert not any(span.units for span in asked(Span(UP.address, 16 * 34, 768)))
    assert not any(span.units for span in asked(Span(UP.address + 8, UP.size, 768)))


def test_nothing_is_known_before_the_first_step() -> None:
    following = Following()
    assert following.after(QKV, NOTHING, MOST) == NOTHING
    assert following.after(GATE, UP, MOST) == NOTHING
