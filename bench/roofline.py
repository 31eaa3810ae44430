"""Bytes, arithmetic, launches and predicted speed of a model's steps on a GPU, from its Plan.

    bench/roofline.py MODEL.gguf ... [--machine FILE] [-ctk q8_0 -ctv q8_0] [--fit]

A header alone will do for a model. Without --machine: an H200, on which the shares of bandwidth and
arithmetic were measured (bench/h200.json), and a V100, for which everything is arithmetic. --fit
prints shares that suit the measurements best, for topology/roofline.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from voltapile.kernels.backend import describe
from voltapile.shm.gguf import Gguf
from voltapile.topology import machine, roofline
from voltapile.topology.architectures import spec_of
from voltapile.topology.gpu import Gpu
from voltapile.topology.plan import Backend, Options, Plan
from voltapile.topology.planner import largest_context, plan
from voltapile.topology.roofline import Card, Work
from voltapile.topology.spec import Spec

MEASURED = Path(__file__).with_name("h200.json")
CONTEXTS, STREAMS, PROMPTS = (512, 8192, 32768, 131072), (8, 32), (512, 2048, 8192, 32768)
STREAM_CONTEXT = 512
BATCH = 2048
GPUS = [("NVIDIA H200", 90, 141), ("Tesla V100-SXM2-32GB", 70, 32)]
HEADER = ("step", "GB", "TFLOP", "launches", "limit tok/s", "predicted", "of limit", "measured")


@dataclass(frozen=True)
class Model:
    name: str
    spec: Spec
    plan: Plan
    largest: int  # context that fits

    def work_of(self, row: dict[str, Any], card: Card) -> Work:
        if "prefill" in row:
            return roofline.prefill(self.spec, self.plan, row["prefill"], at_once=card.at_once)
        contexts = [row["decode"]] * row.get("streams", 1)
        return roofline.decode(self.spec, self.plan, contexts, card.at_once)


def open_model(path: Path, computer: machine.Machine, args: argparse.Namespace) -> Model:
    """Raises ValueError where its weights do not fit."""
    types = {"cache_type_k": args.cache_type_k, "cache_type_v": args.cache_type_v}
    options = Options(context=512, slots=1, batch_tokens=BATCH, **types)
    with Gguf.open(path) as gguf:
        spec, backend = spec_of(gguf), Backend(**describe("cuda"))
        made = plan(spec, gguf, computer, backend, options)
        return Model(path.stem, spec, made, largest_context(spec, gguf, computer, backend, options))


def machines(args: argparse.Namespace) -> Iterator[machine.Machine]:
    if args.machine:
        yield machine.load(args.machine)
        return
    for name, arch, size in GPUS:
        card = Gpu(index=0, name=name, arch=arch, memory_bytes=size << 30, free_bytes=size << 30)
        yield msgspec.structs.replace(machine.probe(), gpus=[card])


def rows_of(model: Model) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """What it is, the context that it needs, and its work as in h200.json."""
    for context in CONTEXTS:
        yield f"decode at {context:,}", context, {"decode": context}
    for streams in STREAMS:
        row = {"decode": STREAM_CONTEXT, "streams": streams}
        yield f"{streams} streams at {STREAM_CONTEXT}", STREAM_CONTEXT * streams, row
    for tokens in PROMPTS:
        yield f"prefill {tokens:,}", tokens, {"prefill": tokens}


def show(model: Model, card: Card, measured: dict[str, Any], is_default_cache: bool) -> None:
    print(f"\n{model.name}\n| {' | '.join(HEADER)} |\n{'|---' * len(HEADER)}|")
    for label, context, row in rows_of(model):
        work = model.work_of(row, card)
        predicted, limit = roofline.seconds(work, card), roofline.limit(work, card)
        known = [
            each["tok_s"]
            for each in measured["rows"]
            if each == {**row, "model": model.name, "tok_s": each["tok_s"]}
        ]
        cells = [
            label,
            f"{work.bytes / 1e9:.2f}",
            f"{work.flops / 1e12:.3g}",
            str(work.launches),
            f"{work.tokens / limit:,.0f}",
            f"{work.tokens / predicted:,.0f}" if context <= model.largest else "does not fit",
            f"{limit / predicted:.0%}",
            f"{known[0]:,}" if known and card.is_measured and is_default_cache else "",
        ]
        print(f"| {' | '.join(cells)} |")


def fit(models: list[Model], card: Card, measured: dict[str, Any]) -> None:
    """Least squares of relative errors. What only few rows depend on may be fixed beforehand."""
    by_name = {model.name: model for model in models}
    rows = [row for row in measured["rows"] if row["model"] in by_name]
    works = [by_name[row["model"]].work_of(row, card) for row in rows]
    seconds = np.array([w.tokens / row["tok_s"] for w, row in zip(works, rows, strict=True)])
    names, fixed = list(roofline.OURS), measured["fixed"]
    costs = np.array([list(roofline.costs(work, card).values()) for work in works])
    known = np.array([1 / fixed.get(name, np.inf) for name in names])
    left = (seconds - costs @ known) / seconds
    inverse = np.array([1 / share for share in roofline.OURS.values()])
    for _ in range(20):  # which of two parts binds a product follows from the shares
        counted = binding(costs, inverse, names)
        matrix = counted * [name not in fixed for name in names] / seconds[:, None]
        inverse = known + non_negative(matrix, left)
    for name, value in zip(names, inverse, strict=True):
        print(f'    "{name}": {1 / value:.3g},' if value > 0 else f"    # {name}: nothing to fit")
    for row, share in zip(rows, counted @ inverse / seconds, strict=True):
        print(f"    # {row}: {share:.2f} of the measured time")


def binding(costs: np.ndarray, inverse: np.ndarray, names: list[str]) -> np.ndarray:
    """costs without the part of each row's products that takes less time."""
    pair = [names.index("weights"), names.index("few")]
    less = np.argmin(costs[:, pair] * inverse[pair], axis=1)
    found = costs.copy()
    found[np.arange(len(costs)), np.array(pair)[less]] = 0
    return found


def non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x >= 0 that brings matrix @ x closest to target, by leaving out what would be negative."""
    active = list(np.flatnonzero(matrix.any(axis=0)))
    found = np.zeros(matrix.shape[1])
    while active:
        solution = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
        if (solution >= 0).all():
            found[active] = solution
            break
        del active[int(solution.argmin())]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--machine", type=Path, help="of the first GPU in this file")
    parser.add_argument("-ctk", "--cache-type-k", default="")
    parser.add_argument("-ctv", "--cache-type-v", default="")
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    measured = json.loads(MEASURED.read_text())
    for computer in machines(args):
        card = roofline.card_of(computer.gpus[0]) if computer.gpus else None
        if card is None:
            raise SystemExit("that machine has no GPU whose speed is known")
        if args.fit:
            fit([open_model(path, computer, args) for path in args.models], card, measured)
            return
        told = (
            f"calibrated against measurements of {measured['date']}, commit {measured['commit']}"
            if card.is_measured
            else f"ARITHMETIC, NOT MEASURED: shares of full speed as on an {measured['card']}"
        )
        print(
            f"\n## {card.name}, {card.bandwidth / 1e12:.2f} TB/s, {card.flops / 1e12:.0f} TFLOP/s"
        )
        print(told)
        for path in args.models:
            try:
                model = open_model(path, computer, args)
            except ValueError as error:
                print(f"\n{path.stem}: {error}")
                continue
            show(model, card, measured, not (args.cache_type_k or args.cache_type_v))


if __name__ == "__main__":
    main()
