"""Engine: one rank's model, caches and recorded steps; runs a Step and gives its Result.

Allocates what the Plan says when it loads and nothing afterwards; decides nothing: which rows,
pages and slots a Step uses was decided by the gateway. Knows no socket and no clock but its own
stop-watch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from voltapile.kernels.load import load as load_ops
from voltapile.kernels.ops import (
    FINISH_NAMES,
    NOT_FINITE,
    Batch,
    Graph,
    Ops,
    StepOutput,
    step_output,
)
from voltapile.shm.board import Board
from voltapile.shm.gguf import Gguf
from voltapile.topology.architectures import spec_of
from voltapile.topology.plan import Plan
from voltapile.workers.batch import BatchBuffer
from voltapile.workers.caches import Caches
from voltapile.workers.models.registry import model_class
from voltapile.workers.protocol import Result, Row, Sampled, Sampling, Step, Want
from voltapile.workers.scoring import PromptScores
from voltapile.workers.weights import DummyWeights, FileWeights, HugePages

Progress = Callable[[str, float], None]  # stage, fraction


class Engine:
    """`load` first, then `run` for each Step."""

    def __init__(
        self, plan: Plan, ops: Ops, gguf: Gguf, rank: int = 0, is_dummy: bool = False
    ) -> None:
        self.is_dummy = is_dummy
        self.plan, self.ops, self.gguf, self.rank = plan, ops, gguf, rank
        self.most_outputs = max([plan.slots, *plan.buckets])
        self.wants = [Want()] * plan.slots
        self.scores: dict[int, PromptScores] = {}  # by slot, where they are wanted

    def load(self, progress: Progress = lambda stage, fraction: None) -> None:
        """Build the model, allocate caches, record the decode steps."""
        spec = spec_of(self.gguf)
        kind = DummyWeights if self.is_dummy else FileWeights
        weights = kind(self.gguf, self.ops, lambda f: progress("weights", f), self._pages())
        self.model = model_class(spec.architecture)(spec, weights, self.ops)
        self.layers = spec.layers
        progress("caches", 0.0)
        self.caches = Caches(self.plan, self.ops)
        most_tokens = max(self.plan.batch_tokens, self.most_outputs)
        self.buffer = BatchBuffer(self.ops, most_tokens, self.caches.pages)
        self.out = step_output(self.ops, self.most_outputs)
        self.graphs: dict[int, Graph] = {}
        progress("kernels", 0.0)
        self.ops.prepare(self._rehearse)
        if self.ops.captures:
            for done, rows in enumerate(sorted(self.plan.buckets)):
                progress("capture", done / len(self.plan.buckets))
                self.graphs[rows] = self._record(rows)
        progress("ready", 1.0)

    def _pages(self) -> HugePages | None:
        """Memory for the weights, where the Plan copies them."""
        if not any(each.tier == "host" for each in self.plan.tensors.values()):
            return None
        return HugePages(self.plan.ranks[self.rank].memory["weights"])

    def run(self, step: Step) -> Result:
        """Compute one Step."""
        began = time.perf_counter()
        assert step.rounds == 1, "several rounds in one Step are not built yet"
        self._apply(step)
        rows: list[Sampled] = []
        if step.rows:
            batch = self._compute(step.rows)
            rows = self._answers(step.rows, batch)
            self._score_prompts(step.rows, rows)
        return Result(id=step.id, rows=rows, seconds=time.perf_counter() - began)

    def forget(self) -> None:
        """Set all slots free: the gateway that filled them is gone."""
        for slot in range(self.plan.slots):
            self.caches.release(slot)

    def prompt_logits(self, tokens: np.ndarray) -> Iterator[np.ndarray]:
        """float32 [n, V] pieces of the logits after each of `tokens`, from an empty slot 0.

        For measurements: nothing else may be running.
        """
        assert len(tokens) <= self.plan.context, f"{len(tokens)} tokens, {self.plan.context} fit"
        self.caches.release(0)
        self.caches.append(0, first_pages(self.plan, len(tokens)))
        for start in range(0, len(tokens), self.plan.batch_tokens):
            yield from self._logits(0, tokens[start : start + self.plan.batch_tokens], start)
        self.caches.release(0)

    def _logits(self, slot: int, tokens: np.ndarray, start: int) -> Iterator[np.ndarray]:
        """float32 [n, V] pieces of the logits after each token of one row."""
        self.ops.reset_scratch()
        batch = self.buffer.fill_all_outputs(slot, tokens, start)
        hidden, _ = self.model.forward(batch, self.caches.layers)
        for first in range(0, len(tokens), self.most_outputs):
            with self.ops.scope():
                logits = self.model.head(hidden[first : first + self.most_outputs])
                yield self.ops.to_host(logits)

    def _apply(self, step: Step) -> None:
        """Everything of a Step that comes before its rows are computed."""
        for slot in step.release:
            self.caches.release(slot)
        for copy in step.copy:
            self.caches.copy(copy)
        for row in step.rows:
            assert row.embeds is None, "vision rows are not built yet"
            assert row.mask is None, "grammar masks are not built yet"
            assert row.forced < 0, "forced tokens are not built yet"
            if row.sampling is not None:
                self._begin_request(row.slot, row.sampling, row.want or Want())
            if row.history is not None:
                self.caches.remember(row.slot, row.history)
            self.caches.append(row.slot, row.pages)

    def _begin_request(self, slot: int, sampling: Sampling, want: Want) -> None:
        self.wants[slot] = want
        self.caches.begin_request(slot, sampling, want)
        self.scores.pop(slot, None)
        if want.prompt_logprobs >= 0:
            self.scores[slot] = PromptScores(sampling.prompt_tokens, want.prompt_logprobs)

    def _compute(self, rows: Sequence[Row]) -> Batch:
        """Run the rows: replay a recorded step if all of them are one token, else run eagerly."""
        if all(row.sample and len(row.tokens) <= 1 for row in rows):
            bucket = min((n for n in self.graphs if n >= len(rows)), default=0)
            if bucket:
                padding = bucket - len(rows)
                batch = self.buffer.fill(rows, padding, self.caches.padding_slot)
                self.graphs[bucket].replay()
                return batch
        batch = self.buffer.fill(rows)
        self.ops.reset_scratch()
        self._forward(batch)
        return batch

    def _record(self, rows: int) -> Graph:
        batch = self.buffer.fill([], rows, self.caches.padding_slot)
        self.ops.reset_scratch()
        with self.ops.capture() as graph:
            self._forward(batch)
        return graph

    def _rehearse(self) -> None:
        """What a chunk of a prompt and each recorded step need of the backend."""
        slot = self.caches.padding_slot
        prompt = Row(slot=slot, tokens=np.zeros(self.plan.batch_tokens, np.int32), sample=True)
        batches = [([prompt], 0), *(([], rows) for rows in self.plan.buckets)]
        for rows, padding in batches:
            self.ops.reset_scratch()
            self._forward(self.buffer.fill(rows, padding, slot))

    def _forward(self, batch: Batch) -> None:
        self.ops.begin(batch, self.caches.state)
        hidden, _ = self.model.forward(batch, self.caches.layers)
        count = len(batch.outputs)
        if count:
            out = StepOutput(
                tokens=self.out.tokens[:count],
                finish=self.out.finish[:count],
                logprob_ids=self.out.logprob_ids[:count],
                logprobs=self.out.logprobs[:count],
            )
            self.ops.sample(self.model.head(hidden), batch, self.caches.state, out)

    def _answers(self, rows: Sequence[Row], batch: Batch) -> list[Sampled]:
        sampling = [row for row in rows if row.sample]
        if not sampling:
            self.ops.synchronize()
            return []
        tokens = self.ops.to_host(self.out.tokens).tolist()
        finish = self.ops.to_host(self.out.finish).tolist()
        answers = []
        for i, row in enumerate(sampling):
            answer = Sampled(slot=row.slot, finish=FINISH_NAMES[finish[i]])
            if tokens[i] >= 0:
                answer.tokens = [tokens[i]]
            answers.append(answer)
        self._add_logprobs(answers)
        bad = [i for i in range(len(sampling)) if finish[i] == NOT_FINITE]
        for i, error in zip(bad, self._explain(batch, bad), strict=True):
            answers[i].error = error
        return answers

    def _add_logprobs(self, answers: list[Sampled]) -> None:
        """To the answers of requests that want them; answers[i] is row i of the output."""
        wanted = [i for i, a in enumerate(answers) if a.tokens and self.wants[a.slot].logprobs >= 0]
        if not wanted:
            return
        ids = self.ops.to_host(self.out.logprob_ids[: len(answers)])
        values = self.ops.to_host(self.out.logprobs[: len(answers)])
        for i in wanted:
            pairs = zip(ids[i].tolist(), values[i].tolist(), strict=True)
            answers[i].logprobs = [[pair for pair in pairs if pair[0] >= 0]]

    def _score_prompts(self, rows: Sequence[Row], answers: list[Sampled]) -> None:
        """Compute the rows of wanted prompts once more, with logits after each token: the usual
        way stays as it is, and keys and values are written again, unchanged."""
        for row in rows:
            scores = self.scores.get(row.slot)
            if scores and len(row.tokens) and scores.needs(row.start):
                scores.add(row.start, row.tokens, self._logits(row.slot, row.tokens, row.start))
        for answer in answers:
            if answer.slot in self.scores:
                answer.prompt_logprobs = self.scores.pop(answer.slot).found

    def _explain(self, batch: Batch, bad: list[int]) -> list[str]:
        """Where the non-finite logits of some outputs come from."""
        if not bad:
            return []
        host = [self.ops.to_host(x) for x in (batch.tokens, batch.slots, batch.positions)]
        last = self.ops.to_host(batch.outputs)[bad]
        return [
            f"rank {self.rank}: non-finite logits ({self._first_bad_place(token, slot, position)})"
            for token, slot, position in zip(*(x[last].tolist() for x in host), strict=True)
        ]

    def _first_bad_place(self, token: int, slot: int, position: int) -> str:
        """Compute one token again, halving the range of layers where it may have gone wrong.

        Its keys and values are written once more, unchanged; nothing else is touched.
        """
        row = Row(slot=slot, start=position, tokens=np.array([token], np.int32))

        def is_bad(boundary: int) -> bool:
            batch = self.buffer.fill([row])
            self.ops.reset_scratch()
            _, tapped = self.model.forward(batch, self.caches.layers, (boundary,))
            return not np.isfinite(self.ops.to_host(tapped[boundary])).all()

        low, high = 0, self.layers + 1
        while low < high:
            middle = (low + high) // 2
            if is_bad(middle):
                high = middle
            else:
                low = middle + 1
        if low > self.layers:
            return "in the output head"
        return f"in layer {low - 1}" if low else "in the embedding"


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
    it is alive, and sees that it must give up. is_dummy: random weights instead of the file's.
    """
    mine = plan.ranks[rank]
    before = os.sched_getaffinity(0)
    progress("file", 0.0)
    with Gguf.open(plan.model[0]) as gguf:
        ops = load_ops(
            plan.backend,
            mine.threads,
            mine.memory["scratch"],
            mine.cpus,
            board.heartbeat_address(rank) if board else 0,
            board.abort_address if board else 0,
            mine.device,
            plan.choices,
        )
        engine = Engine(plan, ops, gguf, rank, is_dummy)
        try:
            engine.load(progress)
            yield engine
        finally:
            os.sched_setaffinity(0, before)


def first_pages(plan: Plan, tokens: int) -> list[list[int]]:
    """Pages of each group for `tokens` positions of a request that is alone. Page 0 is the trash
    page; in a window group, pages come round again when nothing reads their positions any more."""
    return [
        [1 + i % (group.pages - 1) for i in range(-(-tokens // group.page_tokens))]
        for group in plan.caches
    ]
