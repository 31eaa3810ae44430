"""voltapile score: how good the numbers are. Perplexity of a text, and its agreement with others.

The text is cut into windows of the context; every token after a window's first counts. With another
backend or stored logits: KL(theirs || ours) in nats, and how often the best token is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from voltapile.gateway.cli.options import add_model_options, make_plan, model_path

if TYPE_CHECKING:
    from voltapile.workers.engine import Engine

WINDOW = 512  # tokens, unless -c says otherwise
ROWS = 16  # rows of logits computed at once

Rows = Callable[[int, int], np.ndarray]  # (first row, count) -> logits [count, V], in order


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--file", type=Path, metavar="TEXT", help="score this text")
    text.add_argument("--ids", type=Path, metavar="JSON", help="score this list of token ids")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--against", choices=("cpu", "reference"), help="compare with this backend")
    other.add_argument("--logits", type=Path, metavar="NPZ", help="compare with what --save left")
    parser.add_argument("--save", type=Path, metavar="NPZ", help="keep the logits")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    args.ctx_size = args.ctx_size or WINDOW
    args.parallel = args.parallel or ROWS
    ids = read_ids(args)
    if len(ids) < 2:
        raise ValueError(f"{args.file or args.ids}: {len(ids)} token(s), but two are needed")
    score, kept, began = Score(), [], time.perf_counter()
    with contextlib.ExitStack() as stack:
        engine = open_backend(stack, args, args.backend)
        window = engine.plan.context
        theirs = other_rows(stack, args, ids, window)
        for start, ours in pieces(engine, ids):
            end = min(start + len(ours), len(ids) - 1, start // window * window + window - 1)
            targets = ids[start + 1 : end + 1]
            score.add(ours, targets, theirs and theirs(start, len(ours)))
            if args.save:
                kept.append(ours)
    if args.save:
        np.savez(args.save, ids=ids, window=window, logits=np.concatenate(kept))
    report(score.summary() | {"seconds": round(time.perf_counter() - began, 2)}, args.json)
    return 0


def read_ids(args: argparse.Namespace) -> np.ndarray:
    """The token ids to score, checked against the vocabulary."""
    from voltapile.gateway.tokenizer import Tokenizer
    from voltapile.shm.gguf import Gguf
    from voltapile.topology.architectures import spec_of

    with Gguf.open(model_path(args.model)) as gguf:
        rows = spec_of(gguf).vocab
        if args.file:
            text = args.file.read_text(encoding="utf-8")
            return np.asarray(Tokenizer.from_gguf(gguf).encode(text), np.int32)
    ids = json.loads(args.ids.read_text())
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < rows for i in ids):
        raise ValueError(f"{args.ids}: expected a JSON list of token ids from 0 to {rows - 1}")
    return np.asarray(ids, np.int32)


def open_backend(stack: contextlib.ExitStack, args: argparse.Namespace, backend: str) -> Engine:
    from voltapile.workers.engine import open_engine

    chosen = argparse.Namespace(**{**vars(args), "backend": backend})
    return stack.enter_context(open_engine(make_plan(chosen)))


def pieces(engine: Engine, ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, logits) over all windows, in order."""
    for window in range(0, len(ids), engine.plan.context):
        start = window
        for logits in engine.prompt_logits(ids[window : window + engine.plan.context]):
            yield start, logits
            start += len(logits)


def other_rows(
    stack: contextlib.ExitStack, args: argparse.Namespace, ids: np.ndarray, window: int
) -> Rows | None:
    """The logits to compare with; None if there are none."""
    if args.logits:
        stored = np.load(args.logits)
        if not np.array_equal(stored["ids"], ids) or int(stored["window"]) != window:
            raise ValueError(f"{args.logits}: made from another text or with another -c")
        logits = stored["logits"]
        return lambda start, count: logits[start : start + count]
    if not args.against:
        return None
    engine = open_backend(stack, args, args.against)
    assert engine.plan.context == window
    others = pieces(engine, ids)

    def rows(start: int, count: int) -> np.ndarray:
        found, logits = next(others)
        assert (found, len(logits)) == (start, count), "both backends cut a text alike"
        return logits

    return rows


@dataclass
class Score:
    """Sums over the rows seen so far."""

    loss: float = 0.0
    num_targets: int = 0
    divergences: list[float] = field(default_factory=list)
    num_same: int = 0

    def add(self, ours: np.ndarray, targets: np.ndarray, theirs: np.ndarray | None) -> None:
        """targets: the true next tokens of the first rows."""
        q = log_softmax(ours)
        self.loss -= float(q[np.arange(len(targets)), targets].sum())
        self.num_targets += len(targets)
        if theirs is not None:
            p = log_softmax(theirs)
            self.divergences += (np.exp(p) * (p - q)).sum(axis=1).tolist()
            self.num_same += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "tokens": self.num_targets,
            "perplexity": math.exp(self.loss / self.num_targets),
        }
        if self.divergences:
            found["kl_mean"] = float(np.mean(self.divergences))
            found["kl_max"] = float(np.max(self.divergences))
            found["argmax_same"] = self.num_same / len(self.divergences)
        return found


def log_softmax(logits: np.ndarray) -> Any:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def report(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
        return
    for name, value in summary.items():
        print(f"{name:12} {value:.6g}")
