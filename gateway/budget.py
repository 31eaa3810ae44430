"""Budget: how many prompt tokens a Step computes, and whose.

While streams wait for their next token, no more than what keeps their tokens close together. It
does not know pages or slots: who else may have a slot is asked of the scheduler.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable

from voltapile.gateway.costs import Costs
from voltapile.gateway.queues import Turns
from voltapile.gateway.request import Request

MARGIN = 0.8  # of the allowed gap; the rest is for what cannot be foreseen

# Client, tokens left, who may have a slot (by what is left to read of it) -> who has just got one.
Admit = Callable[[str, int, Callable[[Request, int], bool]], Request | None]
Piece = tuple[Request, int, int]  # tokens from, to


class Budget:
    """tokens: most of a Step. max_gap: seconds between two tokens of a stream."""

    def __init__(self, tokens: int, alignment: int, max_gap: float) -> None:
        self.tokens, self.alignment, self.max_gap = tokens, alignment, max_gap
        self.costs = Costs()
        self._turns = Turns()

    def share_out(
        self, running: list[Request], waiting: Iterable[str], decodes: int, admit: Admit
    ) -> dict[Request, int]:
        """Where the chunks of this Step end. Clients take turns of one aligned piece each.

        waiting: clients with requests that have no slot. decodes: tokens of streams in this Step.
        """
        lines: dict[str, list[Request]] = {}
        for request in running:
            if request.is_prefilling:
                lines.setdefault(request.client, []).append(request)
        for client in waiting:
            lines.setdefault(client, [])
        ends: dict[Request, int] = {}
        if not lines:
            return ends
        self._turns.set(lines)
        tokens = self.tokens - decodes
        if decodes:
            tokens = min(tokens, max(self.alignment, 2 * self.costs.widest))
        seconds = self.max_gap * MARGIN - self.costs.base(decodes)
        while lines and tokens > 0:
            client = self._turns.next(lines)
            piece = self._next_piece(client, lines[client], ends, tokens, admit)
            if piece is None:
                del lines[client]
                continue
            request, start, end = piece
            seconds -= self.costs.piece(start, end)
            if decodes and ends and seconds < 0.0:
                break
            ends[request] = end
            tokens -= end - start
            self._turns.took(client)
        return ends

    def _next_piece(
        self, client: str, line: list[Request], ends: dict[Request, int], tokens: int, admit: Admit
    ) -> Piece | None:
        """What a client's turn goes to: its oldest prompt, and every other time its shortest, so
        that a short one gets through and a long one is never left behind."""

        def rest(request: Request) -> int:
            return request.chunk_limit - ends.get(request, request.computed)

        def can_go_on(request: Request) -> bool:
            return rest(request) > 0 and not request.must_stop(ends.get(request, 0))

        unread = [request for request in line if can_go_on(request)]
        if not unread:
            admitted = admit(client, tokens, lambda request, rest: True)
        elif self._turns.is_odd(client):
            unread.sort(key=rest)
            least = rest(unread[0])
            admitted = admit(client, tokens, lambda request, rest: rest < least)
        else:
            oldest = unread[0].id
            admitted = admit(client, tokens, lambda request, rest: request.id < oldest)
        if admitted is not None:
            insort(line, admitted, key=lambda request: request.id)
            unread.insert(0, admitted)
        for request in unread:
            start = ends.get(request, request.computed)
            end = min(request.chunk_limit, (start // self.alignment + 1) * self.alignment)
            if end - start <= tokens:
                return request, start, end
        return None
