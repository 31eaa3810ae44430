"""The dispatcher: what its help shows."""

from __future__ import annotations

import subprocess
import sys

import pytest
from voltapile.gateway.cli.main import COMMANDS, parser_for


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_only_defaults_that_say_something(command: str) -> None:
    text = " ".join(parser_for(command).format_help().split())
    for nothing in ("(default: )", "(default: None)", "(default: [])", "(default: False)"):
        assert nothing not in text


def test_help_shows_defaults() -> None:
    text = " ".join(parser_for("serve").format_help().split())
    for shown in ("(default: 127.0.0.1)", "(default: 8080)", "0: choose (default: 0)"):
        assert shown in text


def test_streams_that_the_caller_closed_are_opened() -> None:
    code = (
        "import os; from voltapile.gateway.cli.main import main; assert main(['--help']) == 0; "
        "assert os.open(os.devnull, os.O_RDONLY) > 2"
    )
    closed = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(closed, timeout=60).returncode == 0
