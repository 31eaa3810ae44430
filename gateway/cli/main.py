"""The command `voltapile`: a thin dispatcher that imports what a subcommand needs when it runs.

Errors that are the caller's become one line on standard error and exit code 1, or 2 where an option
is wrong.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys

from voltapile.gateway.cli.llama_server import tell_without_effect
from voltapile.gateway.cli.parser import WRONG, HelpFormatter, Parser, UsageError

COMMANDS = {
    "serve": "gateway, worker and HTTP API at once",
    "plan": "what would run where, and every byte it takes, before loading",
    "probe": "what this computer has, as the JSON that --machine takes",
    "doctor": "what of this computer keeps a server from starting or from being fast",
    "worker": "one worker process alone",
    "gateway": "the HTTP gateway alone; workers are started separately",
    "chat": "talk to a running server from the terminal",
    "bench": "prefill and decode speed, without a server",
    "score": "perplexity of a text, and KL against another backend or stored logits",
}


def parser_for(command: str) -> Parser:
    """The parser of one subcommand; imports only that subcommand's module."""
    module = importlib.import_module(f"voltapile.gateway.cli.{command}")
    parser = Parser(
        prog=f"voltapile {command}",
        description=COMMANDS[command],
        formatter_class=HelpFormatter,
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)
    return parser


def usage() -> str:
    lines = [f"  {name:8} {text}" for name, text in COMMANDS.items()]
    return (
        "usage: voltapile COMMAND [options]\n\n"
        + "\n".join(lines)
        + "\n\n"
        + ("voltapile COMMAND --help shows its options.\n")
    )


def fill_standard_streams() -> None:
    """Open what the caller closed of descriptors 0 to 2: a socket in such a place ends uvloop."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    fill_standard_streams()
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"voltapile {version('voltapile')}")
        return 0
    if arguments[0] not in COMMANDS:
        print(f"voltapile: no command {arguments[0]!r}\n\n{usage()}", end="", file=sys.stderr)
        return 2
    args = parser_for(arguments[0]).parse_args(arguments[1:])
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )
    tell_without_effect(args)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, MemoryError) as error:
        if args.verbose:
            raise
        print(f"voltapile: {told(error)}", file=sys.stderr)
        return WRONG if is_usage(error) else 1


def is_usage(error: Exception) -> bool:
    """Whether an option has a value that it may not have."""
    from voltapile.topology.plan import OptionError

    return isinstance(error, UsageError | OptionError)


def told(error: Exception) -> str:
    """For people: without the number that Python puts before what the system says."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([*names, error.strerror])


if __name__ == "__main__":
    sys.exit(main())
