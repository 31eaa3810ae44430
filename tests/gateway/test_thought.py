import pytest
from voltapile.gateway.thought import ThoughtLimit

NAMES = {1: b"<think>", 2: b"</th", 3: b"ink>", 8: "é".encode()[:1], 9: b"a"}


def limit(budget, is_open):
    def text(ids):
        return b"".join(NAMES[i] for i in ids)

    return ThoughtLimit(budget, () if is_open else (1,), (2, 3), b"</think>", text)


@pytest.mark.parametrize(
    ("generated", "forced"),
    [([], -1), ([9], -1), ([9, 9], 2), ([9, 9, 2], 3), ([9, 9, 2, 3], -1), ([9, 2, 3, 9, 9], -1),
     ([9, 2], 3), ([9, 2, 9], 2), ([9, 8], -1)],
)  # fmt: skip
def test_the_end_is_forced_when_the_budget_is_spent(generated, forced):
    assert limit(2, True).forced(generated) == forced
    assert limit(2, False).forced([1, *generated]) == forced


def test_nothing_is_forced_on_an_answer_without_reasoning():
    assert limit(0, False).forced([9, 9]) == -1


def test_no_budget_at_all():
    assert limit(0, True).forced([]) == 2


def test_when_all_tokens_must_be_known():
    assert [limit(2, False).is_due(n) for n in range(5)] == [False, False, False, True, True]
