"""Scheduler: what each Step computes. One rule: computed catches up with known within a budget.

Pure arithmetic on integers: no sockets, clocks, tensors or logging. Prefill, chunked prefill,
decode, run-ahead, preemption and recovery (computed = 0) are that one rule.

Why slots and pages are free the moment that a request leaves its slot, although Steps in flight
still write to them: workers run Steps in order, and whoever gets them next is in a later Step.
`release` of that Step clears the slot before its rows run. A row in flight for a request that has
finished gives nothing; one that was preempted still gets its tokens, and waits for them (`ahead`)
before it can have a slot again, so no token is drawn twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
from voltapile.gateway.pages import PagePool
from voltapile.gateway.request import Chunk, Refused, Request, State
from voltapile.topology.plan import Plan
from voltapile.workers.protocol import (
    CONTINUE,
    MAX_STOP_IDS,
    ProtocolError,
    Result,
    Row,
    Sampled,
    Sampling,
    Step,
    Want,
)

ALIGNMENT = 64  # prefill chunks end at absolute multiples of it, so that bits do not vary


@dataclass
class Flight:
    """A Step that has left and has no Result yet."""

    step: int
    sampling: dict[int, Request]  # by slot: the rows that will answer


class Scheduler:
    """add and cancel requests; schedule() -> Step; apply(Result) -> chunks."""

    def __init__(self, plan: Plan) -> None:
        self.context = plan.context
        self.budget = plan.batch_tokens
        self.alignment = min(ALIGNMENT, plan.batch_tokens)
        self.steps_in_flight = max(1, plan.steps_in_flight)
        # Decode rows must leave room for a whole chunk, or a prompt could wait for ever.
        slots = max(1, min(plan.slots, plan.batch_tokens - self.alignment))
        self.pools = [PagePool(cache.pages, cache.page_tokens) for cache in plan.caches]
        self.waiting: deque[Request] = deque()  # by arrival, and all later than any in running
        self.running: list[Request] = []  # by arrival
        self.in_flight: deque[Flight] = deque()
        self.preemptions = 0
        self._slots = list(range(slots - 1, -1, -1))
        self._releases: list[int] = []  # slots that the next Step sets free at the workers
        self._next_request = 0
        self._next_step = 0
        self._by_id: dict[int, Request] = {}

    # --- requests -------------------------------------------------------------------------

    def add(self, prompt: list[int], sampling: Sampling, want: Want | None = None) -> Request:
        """Queue a generation. Raises Refused if it can never run."""
        last = min(sampling.max_position, self.context)
        if not prompt:
            raise Refused("the prompt is empty: it needs at least one token")
        if len(prompt) >= self.context:
            raise Refused(
                f"the prompt has {len(prompt)} tokens, and the context is {self.context}: "
                "at least one position must stay free",
                "context_length_exceeded",
            )
        if last <= len(prompt):
            raise Refused("at least one token must be asked for", param="max_tokens")
        if len(sampling.stop_ids) > MAX_STOP_IDS:
            raise Refused(f"more than {MAX_STOP_IDS} stop tokens", param="stop")
        if any(pool.count(last - 1) > pool.total for pool in self.pools):
            raise Refused(
                f"{last} positions do not fit into the whole page pool; ask for fewer tokens",
                "context_length_exceeded",
                "max_tokens",
            )
        sampling = msgspec.structs.replace(sampling, max_position=last, prompt_tokens=len(prompt))
        request = Request(self._next_request, prompt, sampling, want)
        self._next_request += 1
        self._by_id[request.id] = request
        self.waiting.append(request)
        return request

    def cancel(self, id: int) -> Request | None:
        """Forget a request; its slot is released with the next Step. None if it had ended."""
        request = self._by_id.get(id)
        if request is not None:
            self._finish(request)
        return request

    def reset(self) -> None:
        """The workers were lost: nothing is in flight, held or computed.

        The next Step still releases the slots, in case that it is the same worker after all.
        """
        for request in reversed(self.running):
            self._leave_slot(request, State.WAITING)
            self.waiting.appendleft(request)
        for request in self.waiting:  # a preempted one may wait for tokens that never come
            request.ahead = 0
        self.running.clear()
        self.in_flight.clear()

    def clear(self) -> list[Request]:
        """Forget everything; returns the requests that had not ended."""
        self.reset()
        ended = list(self.waiting)
        for request in ended:
            self._finish(request)
        return ended

    # --- steps ----------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next Step, or None if enough are in flight or nothing can be computed now."""
        if len(self.in_flight) >= self.steps_in_flight:
            return None
        rows: list[Row] = []
        sampling: dict[int, Request] = {}
        budget = self.budget

        def take(request: Request, row: Row) -> None:
            nonlocal budget
            rows.append(row)
            budget -= max(1, len(row.tokens))
            if row.sample:
                sampling[request.slot] = request

        for request in self.running[:]:
            if self._can_continue(request) and self._make_room(request):
                take(request, self._continue(request))
        for request in self.running:
            if (end := self._chunk_end(request, budget)) > request.computed:
                take(request, self._prefill(request, end))
        while (admitted := self._admit(budget)) is not None:
            take(admitted, self._prefill(admitted, self._chunk_end(admitted, budget)))
        if not rows:
            return None
        step = Step(id=self._next_step, rows=rows, release=self._releases)
        self._next_step += 1
        self._releases = []
        self.in_flight.append(Flight(step.id, sampling))
        return step

    def apply(self, result: Result) -> list[tuple[Request, Chunk]]:
        """Take in what the oldest Step in flight gave. Raises ProtocolError."""
        if not self.in_flight or result.id < self.in_flight[0].step:
            return []  # a Step of a worker that was given up
        flight = self.in_flight.popleft()
        answers = {row.slot: row for row in result.rows}
        if result.id != flight.step or answers.keys() != flight.sampling.keys():
            raise ProtocolError(
                f"result {result.id} for slots {sorted(answers)}, but step {flight.step} "
                f"samples in slots {sorted(flight.sampling)}"
            )
        live = {s: q for s, q in flight.sampling.items() if q.state is not State.FINISHED}
        for slot in live:  # all of it is looked at before any of it counts
            if not answers[slot].tokens and not answers[slot].finish:
                raise ProtocolError(f"no token for slot {slot}, which had not finished")
        return [(request, self._receive(request, answers[slot])) for slot, request in live.items()]

    # --- one request ----------------------------------------------------------------------

    def _receive(self, request: Request, row: Sampled) -> Chunk:
        request.ahead -= 1
        request.known += row.tokens
        if row.finish:
            self._finish(request)
        return Chunk(row.tokens, row.finish, row.error, row.logprobs)

    def _can_continue(self, request: Request) -> bool:
        """Its slot has sampled a token that is not computed, and one more may follow."""
        return (
            request.state is State.RUNNING  # not preempted a moment ago
            and not request.is_prefilling
            and request.computed < request.total < request.sampling.max_position
        )

    def _continue(self, request: Request) -> Row:
        pages = self._extend(request, request.computed + 1)
        row = Row(slot=request.slot, start=request.computed, tokens=CONTINUE, pages=pages)
        request.computed += 1
        request.ahead += 1
        return row

    def _chunk_end(self, request: Request, budget: int) -> int:
        """Where a chunk of at most `budget` tokens ends; not past request.computed: no chunk.

        The end of the prompt is an end also when generated tokens follow it (after a preemption),
        so that the prompt is always cut in the same places.
        """
        if not request.is_prefilling:
            return request.computed
        prompt = len(request.prompt)
        limit = prompt if request.computed < prompt else len(request.known)
        end = request.computed + budget
        return limit if end >= limit else end // self.alignment * self.alignment

    def _prefill(self, request: Request, end: int) -> Row:
        start, request.computed = request.computed, end
        row = Row(
            slot=request.slot,
            start=start,
            tokens=np.array(request.known[start:end], np.int32),
            sample=end == len(request.known),
        )
        if request.is_new:
            row.sampling, row.want, row.pages = request.sampling, request.want, request.pages
            request.is_new = False
        if row.sample:
            request.is_prefilling = False
            request.ahead += 1
        return row

    # --- slots and pages ------------------------------------------------------------------

    def _missing(self, request: Request, positions: int) -> list[int]:
        """For each group, how many more pages `positions` take."""
        held = map(len, request.pages or [[]] * len(self.pools))
        return [pool.count(positions) - n for pool, n in zip(self.pools, held, strict=True)]

    def _fits(self, request: Request, positions: int, spare: int = 0) -> bool:
        missing = self._missing(request, positions)
        return all(n + spare <= pool.free for pool, n in zip(self.pools, missing, strict=True))

    def _extend(self, request: Request, positions: int) -> list[list[int]]:
        """Give the pages that `positions` need; returns the new ones (for Row.pages)."""
        missing = self._missing(request, positions)
        if not any(missing):
            return []
        new = [pool.alloc(n) for pool, n in zip(self.pools, missing, strict=True)]
        request.pages = [a + b for a, b in zip(request.pages, new, strict=True)]
        return new

    def _admit(self, budget: int) -> Request | None:
        """Give the first in the queue a slot and the pages of all that it knows.

        One page more for each running request stays free, or the next steps would preempt it.
        """
        if not self.waiting or not self._slots:
            return None
        request = self.waiting[0]
        if request.ahead or self._chunk_end(request, budget) == 0:
            return None
        if not self._fits(request, len(request.known), len(self.running)):
            return None
        self.waiting.popleft()
        self.running.append(request)
        request.state = State.RUNNING
        request.slot = self._slots.pop()
        request.pages = [[] for _ in self.pools]
        self._extend(request, len(request.known))
        return request

    def _make_room(self, request: Request) -> bool:
        """Make one more position fit, preempting who arrived last. False: that was `request`.

        The first to arrive always succeeds: alone it fits, which `add` has checked.
        """
        while not self._fits(request, request.computed + 1):
            victim = self.running.pop()
            self._leave_slot(victim, State.WAITING)
            self.waiting.appendleft(victim)
            self.preemptions += 1
            if victim is request:
                return False
        return True

    def _finish(self, request: Request) -> None:
        if request.state is State.RUNNING:
            self.running.remove(request)
            self._leave_slot(request, State.FINISHED)
        else:
            self.waiting.remove(request)
            request.state = State.FINISHED
        del self._by_id[request.id]

    def _leave_slot(self, request: Request, state: State) -> None:
        for pool, pages in zip(self.pools, request.pages, strict=True):
            pool.release(pages)
        self._releases.append(request.slot)
        self._slots.append(request.slot)
        request.state, request.slot, request.pages = state, -1, []
        request.computed, request.is_new, request.is_prefilling = 0, True, True
