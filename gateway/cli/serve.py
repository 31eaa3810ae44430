"""voltapile serve: gateway, workers and HTTP API at once.

HTTP listens before the model is loaded (/health tells how far it is), so a port in use is found
first. Ctrl-C or SIGTERM ends streams, workers and files; a second one does not wait for anything.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voltapile.gateway.cli.llama_server import (
    add_request_defaults,
    request_defaults,
    template_source,
)
from voltapile.gateway.cli.options import add_model_options, make_plan
from voltapile.gateway.cli.parser import UsageError

if TYPE_CHECKING:
    from aiohttp import web
    from voltapile.gateway.engine import Engine
    from voltapile.gateway.supervisor import Supervisor
    from voltapile.gateway.template import ChatTemplate
    from voltapile.gateway.tokenizer import Tokenizer
    from voltapile.topology.notify import Notifier
    from voltapile.topology.plan import Plan

LOOK_SECONDS = 0.05  # between two looks at the engine's health
BEAT_SECONDS = 1.0  # between two signs of life for systemd
LEAST_FILES, ROOMY_FILES = 64, 4096  # 4 ranks and no connection take 35
PROGRESS_STEP = 0.25  # of a stage, between two lines
# The numpy backend computes a Step in one breath and gives no sign of life meanwhile.
SILENT_SECONDS = {"reference": 60.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_http_options(parser)
    parser.add_argument("--record", type=Path, metavar="FILE",
        help="write all that the worker is asked and answers; see bench --replay")  # fmt: skip


def add_http_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen at")
    add("--port", type=port, default=8080, metavar="N", help="port to listen at; 0: a free one")
    add("--api-key", action="append", default=[], metavar="KEY",
        help="key that clients must send; several: again, or with commas")  # fmt: skip
    add("--api-key-file", type=Path, metavar="FILE", help="keys, one a line")
    add("--max-gap-ms", type=milliseconds, default=250.0, metavar="MS",
        help="longest pause between a stream's tokens while other prompts are read")  # fmt: skip
    add("--stream-interval-ms", type=milliseconds, default=50.0, metavar="MS",
        help="how long a stream's token may wait for the next ones; 0: not at all")  # fmt: skip
    add("--notify", default="", metavar="SOCKET", help="where systemd listens: ${NOTIFY_SOCKET}")
    add("--metrics", action=argparse.BooleanOptionalAction, default=True,
        help="serve /metrics for Prometheus")  # fmt: skip
    add("--webui", action=argparse.BooleanOptionalAction, default=True,
        help="serve the page at /")  # fmt: skip
    add_request_defaults(parser)


def port(text: str) -> int:
    """Raises ValueError. Checked here, since uvloop takes 70000 for 4464."""
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise ValueError(text)
    return number


def milliseconds(text: str) -> float:
    """Raises ValueError."""
    number = float(text)
    if not number >= 0:  # nan too
        raise ValueError(text)
    return number


def check_open_files() -> None:
    """Raises OSError where there is no room to begin, whatever would come first to find none."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= allowed < LEAST_FILES:
        raise OSError(
            f"ulimit -n is {allowed}: a server needs {LEAST_FILES} open files, and one more for "
            f"each connection; ulimit -n {ROOMY_FILES}, or LimitNOFILE={ROOMY_FILES} in its unit"
        )


def run(args: argparse.Namespace) -> int:
    from voltapile.topology.endpoint import private_endpoint

    check_open_files()
    plan = make_plan(args, private_endpoint())
    if args.record:
        args.record.open("ab").close()  # what cannot be written is told before loading
    return run_loop(Server(plan, args, starts_workers=True).run())


@asynccontextmanager
async def _beating(notifier: Notifier) -> AsyncIterator[None]:
    """The event loop itself tells that it goes round."""

    async def beat() -> None:
        while True:
            notifier.beat()
            await asyncio.sleep(BEAT_SECONDS)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """On uvloop, where it is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        with asyncio.Runner() as runner:
            return runner.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def give_back_memory() -> None:
    """What building a tokenizer took and freed, 100 MB with a large vocabulary: glibc keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def api_keys(args: argparse.Namespace) -> list[str]:
    """Raises OSError."""
    keys = [key for option in args.api_key for key in option.split(",")]
    if args.api_key_file:
        keys += args.api_key_file.read_text().splitlines()
    return [key.strip() for key in keys if key.strip()]


class Server:
    """Everything between the first line printed and the exit code."""

    def __init__(self, plan: Plan, args: argparse.Namespace, starts_workers: bool) -> None:
        self.plan, self.args, self.starts_workers = plan, args, starts_workers
        self.stop = asyncio.Event()
        self.supervisor: Supervisor | None = None
        self.can_chat = True

    async def run(self) -> int:
        """Serve until told to stop. Raises OSError if there is nothing to serve."""
        from voltapile.gateway.api.app import listening
        from voltapile.gateway.engine import Engine
        from voltapile.gateway.supervisor import Pulse, Supervisor, plan_file, worker_command
        from voltapile.topology.notify import Notifier

        async with AsyncExitStack() as stack:
            files = stack.enter_context(ExitStack())
            notifier = Notifier(self.args.notify)
            files.callback(notifier.close)
            await stack.enter_async_context(_beating(notifier))
            self._take_signals(files)  # before there is anything to leave behind
            pulse = files.enter_context(Pulse(self.plan))
            if self.starts_workers:
                path = files.enter_context(plan_file(self.plan))
                commands = [worker_command(path, rank.rank) for rank in self.plan.ranks]
                if self.args.record:
                    commands[self.plan.answer_rank] += ["--record", str(self.args.record)]
                self.supervisor = Supervisor(commands)
            seconds = SILENT_SECONDS.get(self.plan.backend, 4.0)
            gap, interval = self.args.max_gap_ms / 1000, self.args.stream_interval_ms / 1000
            engine = Engine(
                self.plan, self.supervisor, pulse, seconds, max_gap=gap, interval=interval
            )
            app = self._app(engine)
            url = await stack.enter_async_context(listening(app, self.args.host, self.args.port))
            self._say(f"{self._summary()}\n{url} listens; the model is loading")
            if self.starts_workers and self.args.record:
                self.args.record.write_bytes(b"")  # workers append: a restart loses nothing
            await stack.enter_async_context(engine)
            notifier.ready(f"{url} listens")
            await self._report(engine, url)
            await self.stop.wait()
            notifier.stopping()
            self._say("stopping")
        return 0

    def _app(self, engine: Engine) -> web.Application:
        from voltapile.gateway.api.app import make_app

        tokenizer, template = self._language()
        app = make_app(
            engine, tokenizer, template, self.plan,
            api_keys=api_keys(self.args), defaults=request_defaults(self.args),
            metrics=self.args.metrics, webui=self.args.webui,
        )  # fmt: skip
        gc.collect()
        gc.freeze()  # or each full collection looks at all of this again
        give_back_memory()
        return app

    def _language(self) -> tuple[Tokenizer, ChatTemplate | None]:
        from voltapile.gateway.template import ChatTemplate, TemplateError
        from voltapile.gateway.tokenizer import Tokenizer
        from voltapile.shm.gguf import Gguf

        instead = template_source(self.args)
        with Gguf.open(Path(self.plan.model[0])) as gguf:
            tokenizer = Tokenizer.from_gguf(gguf)
            try:
                return tokenizer, ChatTemplate.from_metadata(gguf.metadata, instead)
            except TemplateError as error:
                if instead:
                    raise UsageError(f"--chat-template: {error}") from None
                self._say(f"no chat: {error}")
                self.can_chat = False
                return tokenizer, None

    async def _report(self, engine: Engine, url: str) -> None:
        """Print how loading goes, until it is done. Raises OSError if it fails."""
        shown = ("", 0.0)
        while not self.stop.is_set():
            health = engine.health
            if health.status == "ok":
                page = f"\n{url}/ has a page to chat" if self.args.webui else ""
                return self._say(f"ready{page}\n\n{self._example(url)}\n")
            if health.status == "failed" and self.starts_workers:
                raise OSError(health.reason)
            now = (health.stage, health.fraction // PROGRESS_STEP * PROGRESS_STEP)
            if now != shown:
                reason = f" ({health.reason})" if health.reason else ""
                self._say(f"loading: {health.stage} {health.fraction:.0%}{reason}")
                shown = now
            await asyncio.sleep(LOOK_SECONDS)
        return None

    def _take_signals(self, files: ExitStack) -> None:
        """The first signal ends everything in order, the second at once."""

        def take() -> None:
            if not self.stop.is_set():
                self.stop.set()
                return
            if self.supervisor is not None:
                self.supervisor.kill()
            files.close()
            os._exit(130)

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, take)

    def _summary(self) -> str:
        plan = self.plan
        allocated = sum(sum(rank.memory.values()) for rank in plan.ranks)
        mapped = sum(rank.mapped_bytes for rank in plan.ranks)
        threads = sum(rank.threads for rank in plan.ranks)
        lines = [
            f"{plan.alias} ({plan.architecture}) on {plan.backend}, {threads} thread(s)",
            f"context {plan.context} tokens, {plan.slots} requests at once; memory "
            f"{allocated / 2**20:,.0f} MiB beside {mapped / 2**20:,.0f} MiB of mapped file",
        ]
        return "\n".join(lines + [f"warning: {text}" for text in plan.warnings])

    def _example(self, url: str) -> str:
        key = " -H 'Authorization: Bearer KEY'" if api_keys(self.args) else ""
        if self.can_chat:
            path = "chat/completions"
            asked = '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
        else:
            path, asked = "completions", '"prompt": "The capital of France is"'
        return (
            f"curl -s {url}/v1/{path}{key} -H 'Content-Type: application/json' \\\n"
            f"  -d '{{{asked}, \"temperature\": 0}}'"
        )

    @staticmethod
    def _say(text: str) -> None:
        with suppress(OSError):  # whoever read it has gone, or a disk is full: serve on
            print(text, file=sys.stderr, flush=True)
