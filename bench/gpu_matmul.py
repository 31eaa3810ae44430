"""Matrix products alone on one GPU: GB/s of weights for few rows, TFLOP/s for many.

`python bench/gpu_matmul.py [--quick]`. Shapes of an 8B. Copies of a weight are taken in turn, so
that none stays in the GPU's own cache; few rows are captured, several launches a graph, so that the
gaps between them count. `step` is all products of a decode step of an 8B, each waiting for the one
before it, and nothing else. Shares are of 3.95 TB/s and 790 TFLOP/s, what an H200 reaches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from voltapile.kernels.cuda import dummy, matmul
from voltapile.kernels.cuda.matmul import EVERY_ROW_ALONE, Policy
from voltapile.kernels.cuda.ops import CudaOps
from voltapile.shm.formats import row_bytes

SPEED, FLOPS = 3.95e12, 790e12
BYTES_IN_TURN = 400 << 20  # of copies of a weight: several times the L2 cache
# name, (rows of the matrices of a launch), columns
SHAPES = [
    ("qkv", (4096, 1024, 1024), 4096),
    ("o", (4096,), 4096),
    ("gate+up", (12288, 12288), 4096),
    ("down", (4096,), 12288),
    ("output", (151936,), 4096),
]
WAYS = {"fused": Policy(fused_from=1), "library": Policy(cublas_from=1)}


class Bench:
    def __init__(self) -> None:
        self.ops: Any = CudaOps(0, 6 << 30)
        self._weights: dict[tuple[str, str], list[list[Any]]] = {}

    def weights(
        self, name: str, label: str, rows: tuple[int, ...], columns: int
    ) -> list[list[Any]]:
        key = name, label
        if key not in self._weights:
            each = sum(rows) * row_bytes(name, columns)
            copies = max(2, -(-BYTES_IN_TURN // each)) if each < BYTES_IN_TURN else 1
            self._weights[key] = [
                [self._random(name, (n, columns)) for n in rows] for _ in range(copies)
            ]
        return self._weights[key]

    def _random(self, name: str, shape: tuple[int, int]) -> Any:
        nbytes = shape[0] * row_bytes(name, shape[1])
        weight = self.ops.weight(np.zeros(nbytes, np.uint8), name, shape)
        dummy.fill(self.ops, weight, 1)
        return weight

    def seconds(
        self, name: str, shape: tuple[str, tuple[int, ...], int], tokens: int, policy: Policy
    ) -> float:
        """Of one launch."""
        label, rows, columns = shape
        sets = self.weights(name, label, rows, columns)
        calls = 2 * len(sets) if tokens <= 32 else 4
        x = self.ops.zeros((tokens, columns), np.float32)
        self.ops.upload(x, np.random.default_rng(0).standard_normal(x.shape, np.float32))

        def run() -> None:
            for i in range(calls):
                self.ops.reset_scratch()
                weights = sets[i % len(sets)]
                if label == "gate+up":
                    matmul.glu(self.ops, x, weights[0], weights[1], "silu", policy=policy)
                else:
                    none = [None] * len(weights)
                    matmul.linears(self.ops, x, weights, none, policy=policy)

        run()
        if policy is EVERY_ROW_ALONE:
            with self.ops.capture() as graph:
                run()
            return min(self.timed(graph.replay) for _ in range(5)) / calls
        return min(self.timed(run) for _ in range(3)) / calls

    def timed(self, run: Callable[[], None]) -> float:
        first = self.ops.device.event()
        run()
        return float(self.ops.device.seconds_between(first, self.ops.device.event()))


def few_rows(bench: Bench, name: str, tokens: tuple[int, ...]) -> None:
    print(f"{name}: microseconds and TB/s of weights, for rows")
    print(f"{'':10}" + "".join(f"{count:>16}" for count in tokens))
    total = dict.fromkeys(tokens, 0.0)
    total_bytes = 0
    for shape in SHAPES:
        nbytes = sum(shape[1]) * row_bytes(name, shape[2])
        times = 1 if shape[0] == "output" else 36
        total_bytes += times * nbytes
        line = f"{shape[0]:10}"
        for count in tokens:
            seconds = bench.seconds(name, shape, count, EVERY_ROW_ALONE)
            total[count] += times * seconds
            line += f"{seconds * 1e6:9.1f} {nbytes / seconds / 1e12:6.2f}"
        print(line)
    cells = (f"{s * 1e3:6.2f}ms {total_bytes / s / 1e12:6.2f}" for s in total.values())
    print(f"{'8B':10}" + "".join(f"{cell:>16}" for cell in cells))
    share = total_bytes / total[tokens[0]] / SPEED
    print(f"one row: {100 * share:.0f} % of {SPEED / 1e12} TB/s")


class Step:
    """The matrices of a qwen3-8b. kind: a format, or Q4_K_M, whose every other layer has v and down
    in Q6_K."""

    def __init__(self, bench: Bench, kind: str) -> None:
        self._bench, self._ops = bench, bench.ops
        low = "Q4_K" if kind == "Q4_K_M" else kind
        wide = ("Q4_K", "Q6_K") if kind == "Q4_K_M" else (kind, kind)

        def made(name: str, *shape: int) -> Any:
            return self._ops.dummy_weight(name, shape)

        self._layers = [
            (
                [made(low, 4096, 4096), made(low, 1024, 4096), made(wide[i % 2], 1024, 4096)],
                made(low, 4096, 4096),
                [made(low, 12288, 4096), made(low, 12288, 4096)],
                made(wide[i % 2], 4096, 12288),
            )
            for i in range(36)
        ]
        self._output = made(wide[1], 151936, 4096)
        weights = [w for qkv, o, glu, down in self._layers for w in (*qkv, o, *glu, down)]
        self.nbytes = sum(weight.nbytes for weight in (*weights, self._output))

    def seconds(self, tokens: int) -> float:
        x = self._ops.zeros((tokens, 4096), np.float32)
        self._ops.upload(x, np.random.default_rng(0).standard_normal(x.shape, np.float32))
        self._run(x)
        with self._ops.capture() as graph:
            self._run(x)
        return min(self._bench.timed(graph.replay) for _ in range(6))

    def _run(self, x: Any) -> None:
        ops = self._ops
        ops.reset_scratch()
        for qkv, o, (gate, up), down in self._layers:
            with ops.scope():
                q = matmul.linears(ops, x, qkv, (None,) * 3)[0]
                matmul.linear(ops, q, o, add_to=x)
                matmul.linear(ops, matmul.glu(ops, x, gate, up, "silu"), down, add_to=x)
        matmul.linear(ops, x, self._output)


def steps(bench: Bench, kind: str, tokens: tuple[int, ...]) -> None:
    step = Step(bench, kind)
    cells = ((count, step.seconds(count)) for count in tokens)
    told = ", ".join(
        f"{count}: {1e3 * s:.2f} ms {step.nbytes / s / 1e12:.2f} TB/s" for count, s in cells
    )
    print(f"step of {kind}, by rows: {told}")


def many_rows(bench: Bench, name: str, tokens: tuple[int, ...]) -> None:
    print(f"{name}: TFLOP/s (share of {FLOPS / 1e12:.0f}) and ms of all layers, for tokens")
    ways = {"rows": EVERY_ROW_ALONE, **WAYS}
    for way, policy in ways.items():
        line = f"{way:10}"
        for count in tokens:
            seconds, flops = 0.0, 0.0
            for shape in SHAPES[:-1]:
                seconds += 36 * bench.seconds(name, shape, count, policy)
                flops += 36 * 2.0 * count * sum(shape[1]) * shape[2]
            rate = flops / seconds
            line += (
                f"{count:6}: {rate / 1e12:5.0f} ({100 * rate / FLOPS:2.0f} %) {seconds * 1e3:6.1f}"
            )
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="Q4_K alone, fewer sizes")
    args = parser.parse_args()
    bench = Bench()
    for name in ("Q4_K",) if args.quick else ("Q4_K", "Q6_K", "Q8_0", "F16"):
        few_rows(bench, name, (1, 8) if args.quick else (1, 2, 4, 8, 16, 32))
    for kind in ("Q4_K_M", "Q8_0"):
        steps(bench, kind, (1, 8) if args.quick else (1, 2, 4, 8, 16, 32))
    many_rows(bench, "Q4_K", (64, 512, 2048) if args.quick else (32, 64, 128, 256, 512, 2048))
    if not args.quick:
        many_rows(bench, "Q8_0", (64, 2048))


if __name__ == "__main__":
    main()
