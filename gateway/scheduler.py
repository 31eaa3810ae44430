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

from bisect import insort
from collections import deque
from collections.abc import Callable
from itertools import islice

import numpy as np
from voltapile.gateway.budget import Budget
from voltapile.gateway.costs import Load
from voltapile.gateway.flight import Flight, spare_rounds
from voltapile.gateway.queues import Queues
from voltapile.gateway.request import Chunk, Refused, Request, State, limited
from voltapile.gateway.suspects import FAULT, Suspects
from voltapile.gateway.tables import PageTables, Table
from voltapile.topology.plan import Plan
from voltapile.workers.protocol import (
    CONTINUE,
    Hold,
    ProtocolError,
    Result,
    Row,
    Sampled,
    Sampling,
    Step,
    Want,
)

ALIGNMENT = 64  # prefill chunks end at absolute multiples of it, so that bits do not vary
LOOK_AHEAD = 8  # requests of a client that are looked at for one that can begin


class Scheduler:
    """add and cancel requests; schedule() -> Step; apply(Result) -> chunks.

    max_gap: seconds that may lie between two tokens of a stream while prompts are computed.
    """

    def __init__(self, plan: Plan, max_gap: float = 0.25, alignment: int = ALIGNMENT) -> None:
        self.context = plan.context
        self.alignment = min(alignment, plan.batch_tokens)
        self.steps_in_flight = max(1, plan.steps_in_flight)
        self.can_repeat = len(plan.ranks) < 2  # or a Hold would have to reach all in the same round
        # Decode rows must leave room for a whole chunk, or a prompt could wait for ever.
        slots = max(1, min(plan.slots, plan.batch_tokens - self.alignment))
        self.tables = PageTables(plan, self.alignment)
        self.pools, self.checkpoints = self.tables.pools, self.tables.checkpoints
        self.budget = Budget(plan.batch_tokens, self.alignment, max_gap)
        self.waiting = Queues()
        self.running: list[Request] = []  # by arrival
        self.in_flight: deque[Flight] = deque()
        self.preemptions = 0
        self.cached_tokens = 0  # of all prompts
        self._suspects = Suspects()
        self._stuck: Request | None = None  # nobody later gets a slot before this one has pages
        self._slots = list(range(slots - 1, -1, -1))
        self._releases: list[int] = []  # slots that the next Step sets free at the workers
        self._next_request = 0
        self._next_step = 0
        self._by_id: dict[int, Request] = {}

    # --- requests -------------------------------------------------------------------------

    def add(
        self,
        prompt: list[int],
        sampling: Sampling,
        want: Want | None = None,
        client: str = "",
        salt: bytes = b"",
    ) -> Request:
        """Queue a generation. Raises Refused if it can never run."""
        sampling = limited(prompt, sampling, self.context)
        last = sampling.max_position
        if not self.tables.can_hold(last - 1):
            raise Refused(
                f"{last} positions do not fit into the whole page pool; ask for fewer tokens",
                "context_length_exceeded",
                "max_tokens",
            )
        request = Request(self._next_request, prompt, sampling, want, client, salt)
        self._next_request += 1
        self._by_id[request.id] = request
        self.waiting.add(request)
        return request

    def cancel(self, id: int) -> Request | None:
        """Forget a request; its slot is released with the next Step. None if it had ended."""
        request = self._by_id.get(id)
        if request is not None:
            self._finish(request)
        return request

    def reset(self, weight: int = FAULT) -> list[Request]:
        """The workers were lost: nothing is in flight, held or computed. weight: as suspects know.

        The next Step still releases the slots, in case that it is the same worker after all.
        Returns requests that end here, since they alone were there each time.
        """
        rows = [row for each in self.in_flight for row in (*each.sampling.values(), *each.silent)]
        culprits = self._suspects.accuse(rows, weight)
        self.in_flight.clear()
        for request in reversed(self.running):
            self._leave_slot(request, State.WAITING)
            self.waiting.put_back(request)
        self.running.clear()
        for request in self.waiting:  # a preempted one may wait for tokens that never come
            request.ahead = 0
        self.tables.clear()
        for request in culprits:
            self._finish(request)
        return culprits

    def clear(self) -> list[Request]:
        """Forget everything; returns the requests that had not ended."""
        ended = self.reset()
        left = sorted(self.waiting, key=lambda request: request.id)
        for request in left:
            self._finish(request)
        return ended + left

    # --- steps ----------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next Step, or None if enough are in flight or nothing can be computed now."""
        flights = self.in_flight
        if flights and (len(flights) >= self.steps_in_flight or not flights[-1].is_certain):
            return None
        flight = Flight(self._next_step, Load())
        rows = []
        running = self._isolated() if self._suspects else self.running
        for request in running[:]:
            if self._can_continue(request) and (row := self._continue(request)) is not None:
                rows.append(row)
                flight.sampling[row.slot] = request
        flight.load.decodes = len(rows)
        running = [request for request in running if request.slot >= 0]  # not preempted just now
        ends = self.budget.share_out(running, self.waiting.clients, len(rows), self._admit)
        for request, end in ends.items():
            flight.load.add(request.computed, end)
            if (row := self._prefill(request, end)) is not None:
                rows.append(row)
                if row.sample:
                    flight.sampling[row.slot] = request
                else:
                    flight.silent.append(request)
        if not rows:
            return None
        for request in ends:  # later Steps may share what this one computes
            if request.state is State.RUNNING:
                self.tables.remember(request, request.computed)
        copies = self.checkpoints.copies()
        flight.add(self._spare_rounds(flight))
        step = Step(id=flight.step, rows=rows, release=self._releases, copy=copies)
        step.rounds = flight.left
        self._next_step += 1
        self._releases = []
        flights.append(flight)
        return step

    def hold(self) -> Hold | None:
        """An end to the rounds of the last Step, if somebody waits for it."""
        is_awaited = self.in_flight and (self.waiting or self._releases)
        return self.in_flight[-1].hold() if is_awaited else None

    def apply(self, result: Result) -> list[tuple[Request, Chunk]]:
        """Take in what a round of the oldest Step in flight gave. Raises ProtocolError."""
        if not self.in_flight or result.id < self.in_flight[0].step:
            return []  # a Step of a worker that was given up
        flight = self.in_flight[0]
        answers = {}
        for row in result.rows:
            answers[row.slot] = row
        if result.id != flight.step or answers.keys() != flight.sampling.keys():
            raise ProtocolError(
                f"result {result.id} for slots {sorted(answers)}, but step {flight.step} "
                f"samples in slots {sorted(flight.sampling)}"
            )
        live = []  # all of it is looked at before any of it counts
        for slot, request in flight.sampling.items():
            if request is not None and request.state is not State.FINISHED:
                row = answers[slot]
                if not row.tokens and not row.finish:
                    raise ProtocolError(f"no token for slot {slot}, which had not finished")
                live.append((request, row))
        self.budget.costs.observe(flight.answered(result), result.seconds / result.rounds)
        if not flight.left:
            self.in_flight.popleft()
        chunks = []
        for request, row in live:
            if (chunk := self._receive(request, row, result.rounds)) is not None:
                chunks.append((request, chunk))
        return chunks

    def _spare_rounds(self, flight: Flight) -> int:
        """How often the workers can repeat a Step before anything but its rows' ends matters."""
        samples = [request for request in flight.sampling.values() if request is not None]
        is_all = len(samples) == len(self.running) and not self.waiting
        if not (self.can_repeat and is_all) or self._suspects:
            return 0
        return spare_rounds(samples, self.checkpoints.block if self.checkpoints.pool else 0)

    # --- one request ----------------------------------------------------------------------

    def _receive(self, request: Request, row: Sampled, rounds: int) -> Chunk | None:
        """None: it has failed in a way that may not be its own, and is tried again."""
        request.ahead -= rounds
        if row.finish == "error":
            self.tables.forget(request)
            if request.shared and not request.is_retried:
                self._retry(request)
                return None
        request.known += row.tokens
        request.mask = None  # of the token that has come
        if request.crashes:
            self._suspects.has_tokens(request)
        if request.state is State.RUNNING and row.finish != "error":
            # The newest token may never be computed, whatever Steps in flight ask for.
            self.tables.remember(request, min(request.computed, len(request.known) - 1))
        if row.finish:
            self._finish(request)
        logprobs = row.logprobs, row.prompt_logprobs
        return Chunk(row.tokens, row.finish, row.error, *logprobs, row.hidden)

    def _can_continue(self, request: Request) -> bool:
        """Its slot has sampled a token that is not computed, and one more may follow."""
        return (
            not request.is_prefilling  # also: not preempted a moment ago
            and request.computed
            < len(request.known) + request.ahead
            < request.sampling.max_position
            and request.may_sample
        )

    def _continue(self, request: Request) -> Row | None:
        """One token more, preempting who arrived last. None: that was `request`.

        The first to arrive always succeeds: alone it fits, which `add` has checked.
        """
        start = request.computed
        while (pages := self.tables.extend(request, start, start + 1)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return None
        row = request.bound(Row(slot=request.slot, start=start, tokens=CONTINUE, pages=pages))
        request.computed += 1
        request.ahead += 1
        self.checkpoints.passed(request)
        return row

    def _prefill(self, request: Request, end: int) -> Row | None:
        """None: pages behind its window are still others', so it begins anew later; or it waits
        for a mask."""
        start = request.computed
        if end == len(request.known) and not request.may_sample:
            return None
        pages = self.tables.extend(request, start, end)
        if pages is None:
            self._preempt(request)
            return None
        row = Row(
            slot=request.slot,
            start=start,
            tokens=np.array(request.known[start:end], np.int32),
            pages=pages,
            sample=end == len(request.known),
        )
        if request.is_new:
            row.sampling, row.want = request.sampling, request.want
            row.pages = [table.copy() for table in request.pages]
            if start and (request.needs_history or self.checkpoints.pool):
                row.history = np.array(request.known[:start], np.int32)
            self.checkpoints.enter(request)
            request.is_new = False
        request.computed = end
        self.checkpoints.passed(request)
        if row.sample:
            request.is_prefilling = False
            request.bound(row)
            request.ahead += 1
        return row

    # --- who comes next -------------------------------------------------------------------

    def _admit(
        self, client: str, tokens: int, accepts: Callable[[Request, int], bool]
    ) -> Request | None:
        """Give the first acceptable in a client's queue a slot and the pages of all it knows.

        One page more for each running request stays free, or the next steps would preempt it. One
        for which there are not enough pages keeps others from taking them away.
        """
        if not self._slots or self._suspects:
            return None
        for request in islice(self.waiting.of(client), LOOK_AHEAD):
            if request.ahead or self._is_behind_stuck(request):
                return None
            computed, shared = self.tables.prefix(request)
            rest = len(request.known) - computed
            is_underway = self.tables.is_underway(request, computed, self.running)
            if is_underway or not accepts(request, rest):
                if request is self._stuck:
                    self._stuck = None  # it does not want pages now
                continue
            if min(rest, self.alignment) > tokens:
                return None
            return request if self._begin(request, computed, shared) else None
        return None

    def _begin(self, request: Request, computed: int, shared: Table) -> bool:
        """Give it a slot, if there are pages."""
        if not self.tables.begin(request, computed, shared, len(self.running)):
            if self.running:
                self._stuck = request
                return False
            # Shared pages and those of a whole window may be too many, even for one.
            has_begun = self.tables.begin(request, 0, [[] for _ in shared], 0)
            assert has_begun, "alone it fits, which `add` has checked"
        self._enter_slot(request)
        return True

    def _is_behind_stuck(self, request: Request) -> bool:
        return self._stuck is not None and self._stuck.id < request.id

    # --- slots ----------------------------------------------------------------------------

    def _enter_slot(self, request: Request) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=lambda request: request.id)
        request.enter(self._slots.pop())
        self._stuck = None
        if not request.generated and not request.crashes:
            request.cached = request.shared
            self.cached_tokens += request.cached

    def _leave_slot(self, request: Request, state: State) -> None:
        self.tables.end(request)
        if not request.is_new:
            self._releases.append(request.slot)
        self._slots.append(request.slot)
        request.state, request.slot = state, -1
        request.computed, request.is_new, request.is_prefilling = 0, True, True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._leave_slot(request, State.WAITING)
        self.waiting.put_back(request)
        self.preemptions += 1

    def _finish(self, request: Request) -> None:
        if request.state is State.RUNNING:
            self.running.remove(request)
            self._leave_slot(request, State.FINISHED)
        else:
            self.waiting.remove(request)
            request.state = State.FINISHED
        self._suspects.remove(request)
        if request is self._stuck:
            self._stuck = None
        del self._by_id[request.id]

    # --- failures -------------------------------------------------------------------------

    def _retry(self, request: Request) -> None:
        """Compute it anew, without pages of others; what is in flight for it does not count."""
        request.is_retried, request.ahead = True, 0
        for flight in self.in_flight:
            for slot, other in flight.sampling.items():
                if other is request:
                    flight.sampling[slot] = None
        if request.state is State.RUNNING:
            self._preempt(request)

    def _isolated(self) -> list[Request]:
        """What the next Step may compute: a suspect alone, until it is past where it crashed.

        All others only while no suspect can get a slot."""
        for request in self.running:
            if request in self._suspects:
                return [request]
        if self._slots and self.in_flight:
            return []  # of others: they would be blamed together
        first = self._suspects.first
        if self._slots and self._begin(first, *self.tables.prefix(first)):
            return [first]
        return self.running
