"""The dispatcher: what its help shows."""

from __future__ import annotations

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
