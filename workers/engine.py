"""Engine: one rank's model, caches and recorded steps; runs a Step and gives its Result.

A Step may be submitted while the one before it is being computed, where the backend can do that:
everything is done in the order of submission, and `collect` waits for the oldest one's Result.

Allocates what the Plan says when it loads and nothing afterwards; decides nothing: which rows,
pages and slots a Step uses was decided by the gateway. Knows no socket and no clock but its own
stop-watch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from voltapile.kernels.load import load as load_ops
from voltapile.kernels.ops import (
    FINISH_NAMES,
    NOT_FINITE,
    Array,
    Arrival,
    Batch,
    Graph,
    Ops,
    StepOutput,
    step_output,
)
from voltapile.shm.board import Board
from voltapile.shm.gguf import Gguf
from voltapile.topology.architectures import spec_of
from voltapile.topology.choices import as_chosen
from voltapile.topology.plan import Plan
from voltapile.workers.batch import BatchBuffer
from voltapile.workers.caches import Caches
from voltapile.workers.checkpoints import Checkpoints
from voltapile.workers.group import WAIT_SECONDS, meet
from voltapile.workers.loading import TOGETHER, Progress, Stages, beside, comparison, shortage
from voltapile.workers.models.registry import model_class
from voltapile.workers.not_finite import Search
from voltapile.workers.pooling import pooling_of
from voltapile.workers.prompts import Found, Prompts
from voltapile.workers.protocol import Result, Row, Sampled, Sampling, Step, Want
from voltapile.workers.routing import Routing
from voltapile.workers.shared import shared_tensors
from voltapile.workers.weights import DummyWeights, FileWeights

log = logging.getLogger(__name__)


@dataclass
class Pending:
    """A Step that was submitted and whose Result has not been collected."""

    step: Step
    began: float
    arrival: Arrival
    sampling: list[Row]  # its rows that sample, in the order of the output
    wants: list[Want]  # of those rows' slots
    uses: list[int]  # how often those slots had been freed or taken before
    found: dict[int, Found]  # of prompts, by the slots that answer with it
    counted: list[int]  # layers whose counters of experts come with it

    @property
    def is_done(self) -> bool:
        """Whether `collect` would not wait."""
        return self.arrival.is_there()


class Engine:
    """`load` first, then `run` for each Step, or `submit` and later `collect`."""

    def __init__(
        self, plan: Plan, ops: Ops, gguf: Gguf, rank: int = 0, is_dummy: bool = False
    ) -> None:
        self.is_dummy = is_dummy
        self.plan, self.ops, self.gguf, self.rank = plan, ops, gguf, rank
        self.share = plan.ranks[rank].share
        self.is_alone, self.answers = len(plan.ranks) == 1, rank == plan.answer_rank
        self.most_outputs = max([plan.slots, *plan.buckets])
        self.wants = [Want()] * plan.slots
        self.uses = [0] * plan.slots  # of each slot: how often it was freed or taken
        self.last_end = 0.0  # of the Step that was collected last
        self.shared: Mapping[str, np.ndarray] = {}  # tensors in host memory, for all ranks

    def load(self, progress: Progress = lambda stage, fraction: None) -> None:
        """Build the model, allocate caches, record the decode steps."""
        spec = as_chosen(spec_of(self.gguf), self.plan.choices)
        progress("weights", 0.0)
        kind = DummyWeights if self.is_dummy else FileWeights
        weights = kind.of_plan(
            *(self.gguf, self.ops, spec, self.plan, self.rank),
            lambda f: progress("weights", f),
            self.shared,
        )
        is_read = weights.is_uploaded or weights.copies_all
        self.read_bytes = weights.total if is_read else 0  # the mapped file is read when it is used
        self.copied_bytes = weights.pages.nbytes if weights.pages else 0
        self.model = model_class(spec.architecture)(spec, self.share, weights, self.ops)
        # All ranks route alike, but where each has layers of its own.
        is_told = self.answers or self.plan.mode == "layer"
        self.routing = Routing(self.model.counters() if is_told else {})
        progress("caches", 0.0)
        self.caches = Caches(self.plan, self.ops, self.share, spec.vocab)
        self.model.allocate(self.plan.slots + 1)
        states = [state for _, state in self.model.states()]
        self.checkpoints = Checkpoints(self.ops, states, self.plan.checkpoints)
        most_tokens = max(self.plan.batch_tokens, self.most_outputs)
        self.buffer = BatchBuffer(
            self.ops, most_tokens, self.caches.pages, self.caches.state.history
        )
        self.out = step_output(self.ops, self.most_outputs)
        looked_at = self.model, self.caches.layers, self.buffer, self.ops, spec, self.share
        self.search = Search(*looked_at, self.is_alone, self.checkpoints)
        held = self.buffer, self.caches, self.checkpoints, self.most_outputs, self.answers
        pooling = pooling_of(self.gguf.metadata, spec.architecture)
        self.prompts = Prompts(self.ops, self.model, *held, pooling)
        self.graphs: dict[int, Graph] = {}  # of steps of one token a row, by rows
        self.chunks: dict[int, Graph] = {}  # of prompts as large as a step may be, by outputs
        progress("kernels", 0.0)
        self.ops.prepare(self._rehearse)
        if self.ops.captures:
            for done, rows in enumerate(sorted(self.plan.buckets)):
                progress("capture", done / len(self.plan.buckets))
                self.graphs[rows] = self._record([], rows)
            if self.plan.ranks[self.rank].device != "cpu":
                self.record_chunks()
        progress("ready", 1.0)

    def memory(self) -> dict[str, tuple[int, int]]:
        """(planned, allocated) bytes by purpose."""
        taken = Counter(self.ops.taken)
        tables = sum(table.nbytes for table in self.caches.tables)
        taken[TOGETHER if TOGETHER in taken else "slots"] += self.buffer.host.nbytes + tables
        own = {"weights": self.copied_bytes, "checkpoints": self.checkpoints.memory.nbytes}
        taken.update({purpose: nbytes for purpose, nbytes in own.items() if nbytes})
        return beside(self.plan.ranks[self.rank].memory, taken)

    def run(self, step: Step) -> Result:
        """Compute a Step's first round."""
        return self.collect(self.submit(step))

    def submit(self, step: Step) -> Pending:
        """Begin a round. A backend that computes at once has computed it when this returns."""
        began = time.perf_counter()
        self.model.expect([row.tokens for row in step.rows if len(row.tokens)])
        self._apply(step)
        sampling = [row for row in step.rows if row.sample and self.answers]
        wants = [self.wants[row.slot] for row in sampling]
        found = self.prompts.look(step.rows)
        if step.rows:
            self._compute(step.rows)
        counted = self.routing.due(began)
        arrival = self.ops.fetch(self._output(sampling, wants) + self.routing.arrays(counted))
        uses = [self.uses[row.slot] for row in sampling]
        return Pending(step, began, arrival, sampling, wants, uses, found, counted)

    def collect(self, pending: Pending) -> Result:
        """The Result of the oldest Step that is under way; waits for it."""
        found = pending.arrival.take()
        if pending.counted:
            self.routing.take(pending.counted, found[-len(pending.counted) :])
        rows = self._answers(pending, found) if pending.sampling else []
        began, self.last_end = max(pending.began, self.last_end), time.perf_counter()
        return Result(id=pending.step.id, rows=rows, seconds=self.last_end - began)

    def forget(self) -> None:
        """Set all slots free: the gateway that filled them is gone."""
        for slot in range(self.plan.slots):
            self._release(slot)

    def prompt_logits(self, tokens: np.ndarray) -> Iterator[np.ndarray]:
        """float32 [n, V] pieces of the logits after each of `tokens`, from an empty slot 0.

        For measurements: nothing else may be running.
        """
        assert len(tokens) <= self.plan.context, f"{len(tokens)} tokens, {self.plan.context} fit"
        self.caches.release(0)
        self.caches.append(0, first_pages(self.plan, len(tokens)))
        for start in range(0, len(tokens), self.plan.batch_tokens):
            yield from self.prompts.logits(0, tokens[start : start + self.plan.batch_tokens], start)
        self.caches.release(0)

    def _apply(self, step: Step) -> None:
        """Everything of a Step that comes before its rows are computed."""
        for slot in step.release:
            self._release(slot)
        for copy in step.copy:
            (self.caches if copy.kind == "page" else self.checkpoints).copy(copy)
        for row in step.rows:
            assert row.embeds is None, "vision rows are not built yet"
            if row.sampling is not None:
                self._begin_request(row.slot, row.sampling, row.want or Want())
            if row.history is not None:
                self.caches.remember(row.slot, row.history)
            self.caches.append(row.slot, row.pages)
            if row.sample:
                self.caches.bind(row.slot, row.mask, row.forced)

    def _release(self, slot: int) -> None:
        self.caches.release(slot)
        self.uses[slot] += 1

    def _begin_request(self, slot: int, sampling: Sampling, want: Want) -> None:
        self.wants[slot] = want
        self.uses[slot] += 1
        self.caches.begin_request(slot, sampling, want)
        self.prompts.begin(slot, sampling, want)

    def _compute(self, rows: Sequence[Row]) -> None:
        """Run the rows: replay a recorded step if there is one of this shape, else run eagerly."""
        if all(row.sample and len(row.tokens) <= 1 for row in rows):
            bucket = min((n for n in self.graphs if n >= len(rows)), default=0)
            if bucket:
                padding = bucket - len(rows)
                self.buffer.fill(rows, padding, self.caches.padding_slot)
                self.graphs[bucket].replay()
                return
        batch = self.buffer.fill(rows)
        graph = self.chunks.get(len(batch.outputs))
        if graph and len(batch.tokens) == self.plan.batch_tokens and not batch.generated:
            graph.replay()
            return
        self.ops.reset_scratch()
        self._forward(batch)

    def record_chunks(self) -> None:
        """Without and with an output. It spares a GPU the wait for many launches; a CPU would gain
        nothing, and hear no signal while it computes one."""
        for outputs in range(2):
            self.chunks[outputs] = self._record([self._chunk(bool(outputs))], 0)

    def _record(self, rows: Sequence[Row], padding: int) -> Graph:
        """A step of this shape: what varies is read when it is replayed."""
        batch = self.buffer.fill(rows, padding, self.caches.padding_slot)
        self.ops.reset_scratch()
        with self.ops.capture() as graph:
            self._forward(batch)
        return graph

    def _chunk(self, has_output: bool) -> Row:
        tokens = np.zeros(self.plan.batch_tokens, np.int32)
        return Row(slot=self.caches.padding_slot, tokens=tokens, sample=has_output)

    def _rehearse(self) -> None:
        """What a chunk of a prompt and each recorded step need of the backend."""
        slot = self.caches.padding_slot
        batches = [([self._chunk(True)], 0), *(([], rows) for rows in self.plan.buckets)]
        for rows, padding in batches:
            self.ops.reset_scratch()
            self._forward(self.buffer.fill(rows, padding, slot))

    def _forward(self, batch: Batch) -> None:
        self.ops.begin(batch, self.caches.state)
        hidden, _ = self.model.forward(batch, self.caches.layers)
        count = len(batch.outputs)
        if count and hidden is not None:
            out = StepOutput(
                codes=self.out.codes,
                tokens=self.out.tokens[:count],
                finish=self.out.finish[:count],
                logprob_ids=self.out.logprob_ids[:count],
                logprobs=self.out.logprobs[:count],
            )
            self.ops.sample(self.model.head(hidden), batch, self.caches.state, out)
        if count and self.plan.mode == "layer":
            self.caches.take_sampled(self.plan.answer_rank)

    def _output(self, sampling: Sequence[Row], wants: Sequence[Want]) -> list[Array]:
        """What the host needs to see of self.out."""
        count = len(sampling)
        if not count:
            return []
        arrays = [self.out.codes]  # a copy of all costs less than two of some
        if any(want.logprobs >= 0 for want in wants):
            arrays += [self.out.logprob_ids[:count], self.out.logprobs[:count]]
        return arrays

    def _answers(self, pending: Pending, found: list[np.ndarray]) -> list[Sampled]:
        tokens, finish = found[0].tolist()
        answers = []
        for i, row in enumerate(pending.sampling):
            answer = Sampled(slot=row.slot, finish=FINISH_NAMES[finish[i]])
            if tokens[i] >= 0:
                answer.tokens = [tokens[i]]
                if pending.wants[i].logprobs >= 0:
                    pairs = zip(found[1][i].tolist(), found[2][i].tolist(), strict=True)
                    answer.logprobs = [[pair for pair in pairs if pair[0] >= 0]]
            if finish[i] == NOT_FINITE:
                answer.error = self._explain(row, pending.uses[i])
            if row.slot in pending.found:
                pending.found[row.slot].give(answer)
            answers.append(answer)
        return answers

    def _explain(self, row: Row, uses: int) -> str:
        """Where the non-finite logits after a row come from, if its slot is still the row's.

        A slot that has ended like that stands still, whatever was submitted meanwhile."""
        text = f"rank {self.rank}: non-finite logits"
        slot = row.slot
        if self.uses[slot] != uses:
            return text
        if len(row.tokens):
            token, position = int(row.tokens[-1]), row.start + len(row.tokens) - 1
        else:
            state = self.caches.state
            each = state.last_token, state.next_position
            token, position = (int(self.ops.to_host(x[slot : slot + 1])[0]) for x in each)
        return f"{text} ({self.search.place(token, slot, position)})"


@contextlib.contextmanager
def open_engine(
    plan: Plan,
    rank: int = 0,
    progress: Progress = lambda stage, fraction: None,
    board: Board | None = None,
    is_dummy: bool = False,
) -> Iterator[Engine]:
    """The loaded Engine of one rank of a Plan; its file stays open for as long.

    Meanwhile the calling thread runs on the rank's CPUs only. board: where the backend says that
    it is alive, and sees that it must give up; ranks of a group meet there before they load.
    is_dummy: random weights instead of the file's.
    """
    if len(plan.ranks) > 1 and board is None:
        raise ValueError(f"{len(plan.ranks)} ranks need a process each, and this is one: --ranks 1")
    before, stages, group = os.sched_getaffinity(0), Stages(progress), None
    stages("file", 0.0)
    with Gguf.open(plan.model[0]) as gguf, contextlib.ExitStack() as resources:
        try:
            ops = _load_ops(plan, rank, board)
            if len(plan.ranks) > 1:
                assert board is not None
                stages("group", 0.0)
                wait = WAIT_SECONDS[plan.backend]
                group = meet(plan.id, board, rank, wait, islands=plan.islands)
                ops.join(group)
            engine = Engine(plan, ops, gguf, rank, is_dummy)
            told = partial(stages, "shared tensors")
            engine.shared = resources.enter_context(shared_tensors(plan, gguf, rank, group, told))
            engine.load(stages)
            log.info("%s", stages.summary(engine.read_bytes))
            log.info("%s", comparison(engine.memory()))
            yield engine
        except MemoryError as error:
            raise shortage(error, plan.ranks[rank].memory) from None
        finally:
            with contextlib.suppress(OSError):  # a container may refuse it, as it did at the start
                os.sched_setaffinity(0, before)


def _load_ops(plan: Plan, rank: int, board: Board | None) -> Ops:
    mine = plan.ranks[rank]
    return load_ops(
        plan.backend,
        mine.threads,
        mine.memory["scratch"],
        mine.cpus,
        board.heartbeat_address(rank) if board else 0,
        board.abort_address if board else 0,
        mine.device,
        plan.choices,
    )


def first_pages(plan: Plan, tokens: int) -> list[list[int]]:
    """Pages of each group for `tokens` positions of a request that is alone. Page 0 is the trash
    page; in a window group, pages come round again when nothing reads their positions any more."""
    return [
        [1 + i % (group.pages - 1) for i in range(-(-tokens // group.page_tokens))]
        for group in plan.caches
    ]
