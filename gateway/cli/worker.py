"""voltapile worker: one worker process, started by hand beside a `voltapile gateway`.

Both sides need the same Plan: a file, or the same options, from which the same Plan follows. The
worker may start first, and waits for its gateway; Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from voltapile.gateway.cli.options import add_model_options, make_plan, read_plan
from voltapile.gateway.cli.parser import UsageError
from voltapile.gateway.cli.serve import port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, requires_model=False)  # a Plan names its model
    add = parser.add_argument
    add("--plan", type=Path, metavar="FILE", help="a Plan, as voltapile plan --json prints it")
    add("--rank", type=int, default=0, metavar="N", help="which rank of the Plan")
    add("--connect", default="", metavar="ENDPOINT", help="the gateway's ZeroMQ address")
    add("--record", type=Path, metavar="FILE", help="write every Step and Result here")
    add("--status-port", type=port, default=0, metavar="N",
        help="port of /health and /metrics on 127.0.0.1; 0: a free one")  # fmt: skip
    add("--notify", default="", metavar="SOCKET", help="where systemd listens: ${NOTIFY_SOCKET}")


def run(args: argparse.Namespace) -> int:
    from voltapile.workers.process import Worker

    if (args.plan is None) == (args.model is None):
        raise UsageError("give either --plan FILE or -m FILE")
    plan = read_plan(args.plan) if args.plan else make_plan(args, args.connect)
    if not 0 <= args.rank < len(plan.ranks):
        raise UsageError(f"--rank {args.rank}: the plan has {len(plan.ranks)} rank(s)")
    if args.record:
        args.record.open("ab").close()  # the worker empties it, once it is not refused
    status = {"status_port": args.status_port, "notify": args.notify}
    return Worker(plan, args.rank, args.connect, args.record, **status).run()
