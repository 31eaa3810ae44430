"""Reading: what one chat's answers may hold, and a splitter for each of them.

Made of the template, the request and the end of the rendered prompt, which may have opened the
reasoning already. It does not know how answers come nor how they are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from voltapile.gateway.api.schema import ChatRequest
from voltapile.gateway.api.tools import ToolUse
from voltapile.gateway.dialects.dialect import Dialect
from voltapile.gateway.dialects.recognise import Reasoning
from voltapile.gateway.splitter import Splitter
from voltapile.gateway.template import ChatTemplate
from voltapile.gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reading:
    """thinks: the model's markers of reasoning. reasoning: those that are looked for; None: none.
    is_open: the prompt ends inside of it. is_closed: it ends behind it. shown: control tokens that
    are markers."""

    dialect: Dialect
    use: ToolUse
    thinks: Reasoning | None
    reasoning: Reasoning | None
    is_open: bool
    is_closed: bool
    shown: frozenset[int]

    def splitter(self) -> Splitter | None:
        """For one answer. None: all of it is content."""
        if self.reasoning is None and not self.use.tools:
            return None
        use = self.use
        return Splitter(self.dialect, use.tools, self.reasoning, self.is_open, use.many)


def reading_of(
    tokenizer: Tokenizer, template: ChatTemplate, chat: ChatRequest, rendered: str
) -> Reading:
    reasoning = template.reasoning if chat.splits_reasoning else None
    marks = template.dialect.marks if chat.use.tools else ()
    end, thinks = rendered.rstrip(), template.reasoning
    is_open = thinks is not None and end.endswith(thinks.open.rstrip())
    is_closed = thinks is not None and end.endswith(thinks.close)
    shown = _hidden(tokenizer, marks + (reasoning or ()))
    return Reading(template.dialect, chat.use, thinks, reasoning, is_open, is_closed, shown)


@lru_cache(maxsize=32)
def _hidden(tokenizer: Tokenizer, marks: tuple[str, ...]) -> frozenset[int]:
    """Control tokens among the markers."""
    found = [tokenizer.encode(mark.strip(), add_special=False) for mark in marks]
    return frozenset(ids[0] for ids in found if len(ids) == 1 and tokenizer.is_special(ids[0]))
