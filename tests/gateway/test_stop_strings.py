"""However a text is cut into pieces, what is emitted is the text before the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from voltapile.gateway.stop_strings import StopStrings


def whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """The answer for a text that comes at once: the first end of a stop string decides."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def streamed(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    stopper, out = StopStrings(stops), ""
    for piece in pieces:
        emit, stopped = stopper.push(piece)
        out += emit
        if stopped:
            assert stopper.push("more") == ("", True)
            assert stopper.flush() == ""
            return out, True
    return out + stopper.flush(), False


@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=8),
    st.lists(st.text(alphabet="ab", max_size=4), max_size=4),
)
def test_equals_the_answer_for_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    assert streamed(pieces, stops) == whole("".join(pieces), stops)


@given(st.text(alphabet="abc", max_size=12), st.text(alphabet="abc", min_size=1, max_size=4))
def test_only_a_possible_beginning_is_held_back(text: str, stop: str) -> None:
    stopper = StopStrings([stop])
    emit, stopped = stopper.push(text)
    held = text[len(emit) :]
    if not stopped:
        assert stop.startswith(held)
        longer = [n for n in range(len(held) + 1, len(stop)) if text.endswith(stop[:n])]
        assert not longer, "more had to be held back"


@pytest.mark.parametrize(
    ("stops", "pieces", "emits"),
    [
        (["\n\n"], ["a\n", "b\n", "\nc"], [("a", False), ("\nb", False), ("", True)]),
        (
            ["END"],
            ["the E", "N", "d", "."],
            [("the ", False), ("", False), ("ENd", False), (".", False)],
        ),
        (["bc", "abcd"], ["xabcd"], [("xa", True)]),
        (["c", "abc"], ["xab", "c"], [("x", False), ("", True)]),
        ([], ["a", "b"], [("a", False), ("b", False)]),
    ],
)
def test_examples(stops: list[str], pieces: list[str], emits: list[tuple[str, bool]]) -> None:
    stopper = StopStrings(stops)
    assert [stopper.push(piece) for piece in pieces] == emits
