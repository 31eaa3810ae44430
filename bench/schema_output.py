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


async def speed(url: str, tokens: int, **fields: object) -> float:
    prompt = [random.choice(IDS) for _ in range(PROMPT)]
    done = await stream_completion(url, prompt, tokens, temperature=1, **fields)
    assert done.tokens == tokens, f"the answer ended after {done.tokens} tokens"
    return done.decode_tok_s


async def measure(url: str, tokens: int, rounds: int) -> dict[str, object]:
    await speed(url, 20)
    await speed(url, 20, json_schema=SCHEMA)  # compiled once
    free, bound = [], []
    for _ in range(rounds):
        free.append(await speed(url, tokens))
        bound.append(await speed(url, tokens, json_schema=SCHEMA))
    cost = 1 - statistics.median(bound) / statistics.median(free)
    extra = 1 / statistics.median(bound) - 1 / statistics.median(free)
    return {
        "tokens": tokens,
        "free_tok_s": round(statistics.median(free), 1),
        "bound_tok_s": round(statistics.median(bound), 1),
        "cost_percent": round(100 * cost, 1),
        "extra_us_per_token": round(1e6 * extra),
        "all_free_tok_s": [round(each, 1) for each in free],
        "all_bound_tok_s": [round(each, 1) for each in bound],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", default="1")
    parser.add_argument("--tokens", type=int, default=10_000, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with machine_lock(), serving(args) as (url, _):
        row = asyncio.run(measure(url, args.tokens, args.rounds))
    if args.json:
        print(json.dumps(row))
        return 0
    print("| " + " | ".join(key for key in row if not key.startswith("all_")) + " |")
    print("|---|---|---|---|---|")
    print("| " + " | ".join(str(row[key]) for key in row if not key.startswith("all_")) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
