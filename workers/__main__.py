"""`python -m voltapile.workers`: how a gateway starts a worker. People use `voltapile worker`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from voltapile.topology.plan import from_json
from voltapile.workers.process import Worker


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m voltapile.workers", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="the Plan, a JSON file")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--connect", default="", help="ZeroMQ address instead of the Plan's")
    parser.add_argument("--record", type=Path, help="append every Step and Result")
    parser.add_argument("--dummy", action="store_true", help="random weights, for a bench")
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s text-{args.rank} %(levelname)s %(message)s"
    )
    plan = from_json(args.plan.read_bytes())
    worker = Worker(plan, args.rank, args.connect, args.record, True, args.dummy)
    return worker.run()


if __name__ == "__main__":
    sys.exit(main())
