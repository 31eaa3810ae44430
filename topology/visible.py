"""CUDA_VISIBLE_DEVICES: which GPUs a program sees, and by which numbers it knows them.

CUDA itself obeys the variable in every process; a Plan must count GPUs in the same way. The text is
handed in by whoever may read the environment. Reads it as CUDA does: numbers, or UUIDs, of which a
unique beginning is enough; the first word that names no GPU ends the list, and one that is there
twice empties it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from voltapile.topology.nvml import Card

log = logging.getLogger(__name__)
VARIABLE = "CUDA_VISIBLE_DEVICES"
UUID = "GPU-"  # what each begins with


def visible(cards: Sequence[Card], text: str | None) -> list[Card]:
    """Numbered as a program counts them. text: the variable, None where it is not set."""
    if text is None:
        return list(cards)
    found: list[Card] = []
    words = [word.strip() for word in text.split(",")]
    for word in words:
        card = _by_uuid(cards, word) if words[0].startswith(UUID) else _by_number(cards, word)
        if card is None:
            if word and not word.startswith("-"):  # those are how people say "none"
                log.warning("%s=%s: '%s' is no whole GPU here; the list ends before it",
                            VARIABLE, text, word)  # fmt: skip
            break
        if card in found:
            log.warning("%s=%s: '%s' is there twice: CUDA sees no GPU", VARIABLE, text, word)
            return []
        found.append(card)
    return [card.counted_as(place) for place, card in enumerate(found)]


def _by_number(cards: Sequence[Card], word: str) -> Card | None:
    number = re.match(r"\+?0*([0-9]+)", word)  # CUDA does not look at what follows
    return next((card for card in cards if number and str(card.index) == number[1]), None)


def _by_uuid(cards: Sequence[Card], word: str) -> Card | None:
    """None as well where several begin like this."""
    if not word.startswith(UUID):
        return None
    matching = [card for card in cards if card.uuid.startswith(word)]
    return matching[0] if len(matching) == 1 else None
