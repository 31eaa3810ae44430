"""What an answer of a JSON schema costs: decode speed beside that of a free answer, one stream.

    python bench/schema_output.py -m model.gguf [-t 1] [--tokens 10000] [--rounds 3] [--json]

Rounds measure a free and a bound stream of the same length, one after the other, from a random
prompt; the cost is that of the medians. The schema is an endless list of objects with strings,
numbers, an enum and a list, so that one answer has as many tokens as are asked for. Both draw at
temperature 1. The bound: at most 10 % at SmolLM2's vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys

from gateway_overhead import cpu_seconds
from http_stream import IDS, PROMPT, serving
from streaming import stream_completion
from voltapile.gateway.cli.bench import machine_lock

TEXT = {"type": "string", "maxLength": 60}
ITEM = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "kind": {"enum": ["person", "place", "thing"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 100_000},
        "share": {"type": "number"},
        "is_open": {"type": "boolean"},
        "tags": {"type": "array", "items": TEXT, "maxItems": 5},
        "note": {"type": ["string", "null"], "maxLength": 200},
    },
    "required": ["name", "kind", "count", "tags", "note"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 1_000_000}


async def timed(url: str, pid: int, tokens: int, **fields: object) -> tuple[float, float]:
    """(tokens a second, microseconds of the gateway's CPU a token)."""
    prompt = [random.choice(IDS) for _ in range(PROMPT)]
    before = cpu_seconds(pid)
    done = await stream_completion(url, prompt, tokens, temperature=1, **fields)
    assert done.tokens == tokens, f"the answer ended after {done.tokens} tokens"
    return done.decode_tok_s, (cpu_seconds(pid) - before) / tokens * 1e6


async def measure(url: str, pid: int, tokens: int, rounds: int) -> dict[str, object]:
    await timed(url, pid, 20)
    await timed(url, pid, 20, json_schema=SCHEMA)  # compiled once
    free, bound = [], []
    for _ in range(rounds):
        free.append(await timed(url, pid, tokens))
        bound.append(await timed(url, pid, tokens, json_schema=SCHEMA))
    free_speed, free_cpu = map(statistics.median, zip(*free, strict=True))
    bound_speed, bound_cpu = map(statistics.median, zip(*bound, strict=True))
    return {
        "tokens": tokens,
        "free_tok_s": round(free_speed, 1),
        "bound_tok_s": round(bound_speed, 1),
        "cost_percent": round(100 * (1 - bound_speed / free_speed), 1),
        "extra_us_per_token": round(1e6 * (1 / bound_speed - 1 / free_speed)),
        "free_cpu_us": round(free_cpu),
        "bound_cpu_us": round(bound_cpu),
        "all_free_tok_s": [round(speed, 1) for speed, _ in free],
        "all_bound_tok_s": [round(speed, 1) for speed, _ in bound],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", default="1")
    parser.add_argument("--interval", default="", help="--stream-interval-ms of the server")
    parser.add_argument("--tokens", type=int, default=10_000, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with machine_lock(), serving(args) as (url, pid):
        row = asyncio.run(measure(url, pid, args.tokens, args.rounds))
    if args.json:
        print(json.dumps(row))
        return 0
    shown = {key: str(value) for key, value in row.items() if not key.startswith("all_")}
    print("| " + " | ".join(shown) + " |\n" + "|---" * len(shown) + "|")
    print("| " + " | ".join(shown.values()) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
