"""gemma-3-270m, where somebody has put it (docs/operations.md says how): llama.cpp's ids and words.

The ids are those of llama.cpp's CPU backend on the same file, greedy, as far as no two tokens are
nearly as likely: its 8-bit activations decide such cases otherwise than exact arithmetic does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from voltapile.gateway.tokenizer import Tokenizer
from voltapile.shm.gguf import Gguf

pytestmark = pytest.mark.model
Make = Callable[..., Any]
PATH = Path(__file__).parents[2] / "models/gemma-3-270m-q4_k_m.gguf"
TEXTS = {  # special tokens read as text
    "a  b   c    d": [236746, 138, 236763, 139, 236755, 140, 236753],
    "naïve café": [1789, 238527, 560, 33443],
    "\n\n\n": [109],
    "  leading": [138, 26016],
    "<table><tr>": [168, 173],
    "👨‍👩‍👧‍👦": [243874, 237243, 243767, 237243, 244814, 237243, 244990],
    "こんにちは世界": [85141, 12811],
}
TURN = "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
ANSWERS = {
    "Water boils at a temperature of": " 100 degrees Celsius.\n\nThe boiling point of water ",
    "The three primary colors are": " red, blue, and yellow.\n\nThe primary colors are red, blue, ",
    "In 1969, Neil Armstrong became the first": " man to walk on the moon.\n\nIn 1971, Neil",
}


@pytest.fixture(scope="module")
def gemma() -> Path:
    if not PATH.is_file():
        pytest.skip("gemma-3-270m is not here")
    return PATH


@pytest.fixture(scope="module")
def tokenizer(gemma: Path) -> Tokenizer:
    with Gguf.open(gemma) as gguf:
        return Tokenizer.from_gguf(gguf)


def test_ids(tokenizer: Tokenizer) -> None:
    for text, ids in TEXTS.items():
        assert tokenizer.encode(text, add_special=False, parse_special=False) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode(TURN) == [2, 105, 2364, 107, 10979, 106, 107, 105, 4368, 107]
    assert (tokenizer.add_bos, tokenizer.add_eos) == (True, False)
    assert {1, 106} <= tokenizer.eog_ids


def test_answers(gemma: Path, tokenizer: Tokenizer, engine_for: Make, drive: Make) -> None:
    driver = drive(engine_for(gemma, "cpu"))
    for prompt, answer in ANSWERS.items():
        found = tokenizer.decode(driver.generate(tokenizer.encode(prompt), 32))
        assert found.startswith(answer)
