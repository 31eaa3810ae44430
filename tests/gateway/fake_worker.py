"""A worker without a model: speaks the protocol and gives tokens that depend on all before them.

As a program: python fake_worker.py PLAN [--step-seconds S] [--heartbeat FILE] [--fail REASON]
[--die CODE] [--die-if FILE] [--die-at STEP] [--poison TOKEN] [--load-seconds S]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import sys
import time
from pathlib import Path

import zmq
from voltapile.topology.plan import from_json
from voltapile.workers.protocol import (
    Failed,
    Hold,
    Ready,
    Result,
    Row,
    Sampled,
    Sampling,
    Stats,
    Step,
    Stop,
    decode,
    encode,
)
from voltapile.workers.rounds import Rounds

VOCAB = 600  # below the special ids of the small golden models


def next_token(tokens: list[int], seed: int) -> int:
    digest = hashlib.blake2b(repr((tokens, seed)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def alone(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    """`count` tokens that a request gives when it is alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


class FakeModel:
    """A fold over Steps; remembers the tokens of each slot, and of each page of the first group."""

    def __init__(self, page_tokens: int = 4) -> None:
        self.page_tokens = page_tokens
        self.memory: dict[int, dict[int, int]] = {}  # page -> offset -> token
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.sampling: dict[int, Sampling] = {}
        self.finish: dict[int, str] = {}

    def run(self, step: Step) -> Result:
        for slot in step.release:
            self.tokens.pop(slot, None)
            self.finish.pop(slot, None)
        rows = [self.row(row) for row in step.rows]
        return Result(id=step.id, rows=[row for row in rows if row], seconds=0.001)

    def row(self, row: Row) -> Sampled | None:
        if row.sampling is not None:
            assert row.slot not in self.tokens
            self.tables[row.slot], self.sampling[row.slot] = [], row.sampling
        if row.pages:
            self.tables[row.slot] += row.pages[0]
        if row.sampling is not None:
            self.tokens[row.slot] = [self.recall(row.slot, p) for p in range(row.start)]
        known, sampling = self.tokens[row.slot], self.sampling[row.slot]
        if self.finish.get(row.slot):
            return Sampled(slot=row.slot)
        if len(row.tokens):
            assert row.start == len(known)
            known += map(int, row.tokens)
            for position in range(row.start, len(known)):
                self.remember(row.slot, position)
        elif row.sample:
            self.remember(row.slot, len(known) - 1)
        if not row.sample:
            return None
        known.append(next_token(known, sampling.seed))
        finish = ""
        if known[-1] in sampling.stop_ids:
            finish = "stop"
        elif len(known) >= sampling.max_position:
            finish = "length"
        self.finish[row.slot] = finish
        return Sampled(slot=row.slot, tokens=[known[-1]], finish=finish)

    def remember(self, slot: int, position: int) -> None:
        page, offset = divmod(position, self.page_tokens)
        cells = self.memory.setdefault(self.tables[slot][page], {})
        cells[offset] = self.tokens[slot][position]

    def recall(self, slot: int, position: int) -> int:
        page, offset = divmod(position, self.page_tokens)
        return self.memory[self.tables[slot][page]][offset]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--heartbeat", type=Path)
    parser.add_argument("--fail", default="")
    parser.add_argument("--die", type=int)
    parser.add_argument("--die-if", type=Path, help="if it is there when loading")
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--poison", type=int, default=-1)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    args = parser.parse_args()
    plan = from_json(args.plan.read_bytes())
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.set(zmq.IDENTITY, b"text-0")
    socket.connect(plan.endpoint)
    socket.send_multipart(
        encode(Stats(name="text-0", values={"stage": "weights", "fraction": 0.5}))
    )
    if args.die is not None:
        print("the last words", file=sys.stderr)
        return int(args.die)
    if args.die_if and args.die_if.exists():
        return 4
    if args.fail:
        socket.send_multipart(encode(Failed(name="text-0", reason=args.fail)))
        return 1
    time.sleep(args.load_seconds)
    model = FakeModel(plan.caches[0].page_tokens)
    serve(socket, args, model, Ready(name="text-0", plan=plan.id,
                              instance=secrets.randbits(63)))  # fmt: skip
    return 0


def serve(
    socket: zmq.Socket[bytes], args: argparse.Namespace, model: FakeModel, ready: Ready
) -> None:
    is_greeted, rounds = False, Rounds()
    parent = os.getppid()
    while os.getppid() == parent:
        if args.heartbeat:
            args.heartbeat.touch()
        if not is_greeted:
            socket.send_multipart(encode(ready))
        while socket.poll(0 if rounds else 200):
            message = decode(socket.recv_multipart())
            is_greeted = True
            if isinstance(message, Stop):
                return
            if isinstance(message, Hold):
                rounds.hold(message.step)
            else:
                assert isinstance(message, Step)
                rounds.add(message)
        if rounds:
            answer(socket, args, model, rounds)


def answer(
    socket: zmq.Socket[bytes], args: argparse.Namespace, model: FakeModel, rounds: Rounds
) -> None:
    step = rounds.next()
    tokens = {int(token) for row in step.rows for token in row.tokens}
    if step.id == args.die_at or args.poison in tokens:
        os._exit(7)
    time.sleep(args.step_seconds)
    result = model.run(step)
    rounds.settle(result)
    socket.send_multipart(encode(result))


if __name__ == "__main__":
    sys.exit(main())
