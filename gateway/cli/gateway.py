"""voltapile gateway: the HTTP gateway alone; its workers are started separately.

Both halves need the same Plan, and meet at its endpoint:

    voltapile plan -m FILE --json > p.json
    voltapile gateway --plan p.json &
    voltapile worker --plan p.json

or `voltapile gateway -m FILE` and `voltapile worker -m FILE` with the same options. Either may come
first, and a worker that is started again gets the open streams back. When the gateway ends it tells
its workers to end.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from voltapile.gateway.cli.options import add_model_options, make_plan, read_plan
from voltapile.gateway.cli.parser import UsageError
from voltapile.gateway.cli.serve import Server, add_http_options, check_open_files, run_loop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, requires_model=False)  # a Plan names its model
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="a Plan, as voltapile plan --json prints it"
    )
    add_http_options(parser)


def run(args: argparse.Namespace) -> int:

    if (args.plan is None) == (args.model is None):
        raise UsageError("give either --plan FILE or -m FILE")
    check_open_files()
    plan = read_plan(args.plan) if args.plan else make_plan(args)
    return run_loop(Server(plan, args, starts_workers=False).run())
