"""Attention alone on one GPU: GB/s of keys and values in decode, TFLOP/s in prefill.

`python bench/gpu_attention.py [--quick]`. Shape of an 8B (32 query heads, 8 KV heads, 128), and of
a 30B-A3B (4 KV heads) where that is said. Caches of several layers are taken in turn, so that no
context stays in the GPU's own cache; launches are captured, several a graph. Shares are of 3.95
TB/s and 790 TFLOP/s, what this card (H200) reaches.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from voltapile.kernels.cuda import attention, pages
from voltapile.kernels.cuda.ops import CudaOps
from voltapile.kernels.ops import Batch

HEADS, KV_HEADS, DIM = 32, 8, 128
SPEED, FLOPS = 3.95e12, 790e12
ROOM = 8192  # positions that these have place for, of which they use few
ROOMY = [(32, 1, 8, 160), (32, 1, 8, 512), (16, 1, 4, 160), (1, 8, 8, 160), (1, 4, 8, 512)]
BYTES_IN_TURN = 400 << 20  # of caches, at least: several times the L2 cache


class Bench:
    def __init__(self) -> None:
        self.ops: Any = CudaOps(0, 2 << 30)

    def put(self, values: np.ndarray) -> Any:
        array = self.ops.zeros(values.shape, values.dtype)
        self.ops.upload(array, values)
        return array

    def batch(
        self, runs: list[tuple[int, int, int]], width: int, outputs: int, room: int = 0
    ) -> Batch:
        """runs: slot, first position, tokens. width, room: pages of a slot, and of its table."""
        slots = np.repeat([slot for slot, _, _ in runs], [n for _, _, n in runs])
        positions = np.concatenate([np.arange(start, start + n) for _, start, n in runs])
        count = 1 + max(slot for slot, _, _ in runs)
        pages = np.random.default_rng(0).permutation(count * width).reshape(count, width)
        pages = np.pad(pages, ((0, 0), (0, max(0, room - width))))
        ints = [self.put(x.astype(np.int32)) for x in (slots, positions)]
        nothing = self.put(np.zeros(len(slots), np.int32))
        return Batch(
            tokens=nothing,
            slots=ints[0],
            positions=ints[1],
            rope_positions=ints[1],
            continues=nothing,
            outputs=nothing[:outputs],
            pages=(self.put(pages.astype(np.int32)),),
        )

    def seconds(
        self,
        runs: list[tuple[int, int, int]],
        kind: str,
        outputs: int,
        calls: int,
        kv_heads: int = KV_HEADS,
        room: int = 0,
    ) -> tuple[float, int]:
        """Of one call, and the bytes of keys and values that it must read. room: positions that
        page tables have place for, at least, as a server's have."""
        width = -(-max(start + n for _, start, n in runs) // 64)
        slots = 1 + max(slot for slot, _, _ in runs)
        length, block = pages.KV_TYPES[kind]
        each = 2 * kv_heads * DIM // length * block  # bytes of a position
        head_map = [h * kv_heads // HEADS for h in range(HEADS)]
        layers = max(2, -(-BYTES_IN_TURN // (slots * width * 64 * each)))
        layers = min(layers, 36)
        caches = [
            pages.kv_cache(self.ops, slots * width, kv_heads, 64, DIM, DIM, kind, kind)
            for _ in range(layers)
        ]
        batch = self.batch(runs, width, outputs, room // 64)
        tokens = len(batch.slots)
        rng = np.random.default_rng(1)
        q = self.put(rng.standard_normal((tokens, HEADS * DIM), np.float32))

        def run() -> None:
            for i in range(calls):
                self.ops.reset_scratch()
                cache = caches[i % layers]
                attention.attention(self.ops, q, cache, batch, 0, head_map, DIM**-0.5)

        run()
        with self.ops.capture() as graph:
            run()
        best = min(self._replay(graph) for _ in range(5))
        return best / calls, each * sum(start + n for _, start, n in runs)

    def _replay(self, graph: Any) -> float:
        self.ops.synchronize()
        began = time.perf_counter()
        graph.replay()
        self.ops.synchronize()
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    quick = parser.parse_args().quick
    bench = Bench()
    print("decode                context       us     GB/s  share")
    contexts = [512, 2048, 32 << 10] if quick else [512, 2048, 8 << 10, 32 << 10, 128 << 10]
    shapes = [("f16", 1, 1, 8), ("q8_0", 1, 1, 8), ("f16", 1, 1, 4), ("f16", 8, 1, 8)]
    shapes += [("f16", 32, 1, 8), ("f16", 1, 8, 8)]
    for kind, streams, rows, kv_heads in shapes[: 3 if quick else None]:
        for context in contexts:
            if streams * context > 256 << 10:
                continue
            runs = [(slot, context - rows, rows) for slot in range(streams)]
            took, nbytes = bench.seconds(runs, kind, streams * rows, 36, kv_heads)
            name = f"{kind} {streams} x {rows}, {kv_heads} heads"
            rate = nbytes / took
            print(f"{name:<20}{context:>9}{took * 1e6:>9.1f}{rate / 1e9:>9.0f}{rate / SPEED:>7.0%}")
    for streams, rows, kv_heads, context in ROOMY:
        runs = [(slot, context - rows, rows) for slot in range(streams)]
        took, nbytes = bench.seconds(runs, "f16", streams * rows, 36, kv_heads, ROOM)
        name, rate = f"room, {streams} x {rows}, {kv_heads} heads", nbytes / took
        print(f"{name:<20}{context:>9}{took * 1e6:>9.1f}{rate / 1e9:>9.0f}{rate / SPEED:>7.0%}")
    print("prefill           tokens        us  TFLOP/s  share")
    for kind in ("f16", "q8_0"):
        for tokens in [2048] if quick else [512, 2048, 8192]:
            took, _ = bench.seconds([(0, 0, tokens)], kind, 1, 8)
            rate = 4 * HEADS * DIM * tokens * (tokens + 1) / 2 / took
            print(
                f"{kind:<16}{tokens:>9}{took * 1e6:>10.1f}{rate / 1e12:>8.0f}{rate / FLOPS:>7.0%}"
            )


if __name__ == "__main__":
    main()
