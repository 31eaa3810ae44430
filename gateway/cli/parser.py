"""How all subcommands read their options and tell what is wrong with them: one line, exit code 2.

Knows argparse alone, and no option.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

WRONG = 2  # exit code of an option that is unknown or has a wrong value
_OPTION = re.compile(r"--[A-Za-z][\w-]*|-[A-Za-z][A-Za-z-]*")


class UsageError(ValueError):
    """Options that contradict each other, or a value that the parser cannot judge."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something, and what an option takes only once."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default in ("", []):
            return action.help
        return super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        default = self._get_default_metavar_for_optional(action)
        taken = self._format_args(action, default)
        return f"{', '.join(action.option_strings)} {taken}"


class Parser(argparse.ArgumentParser):
    """No abbreviations: a longer name that comes later must not change what a command means."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """argparse would read an unknown -md FILE as -m d."""
        words = list(sys.argv[1:] if args is None else args)
        for word in words[: words.index("--")] if "--" in words else words:
            name = word.partition("=")[0]
            if _OPTION.fullmatch(name) and name not in self._option_string_actions:
                known = [each for each in self._option_string_actions if each.startswith("--")]
                close = difflib.get_close_matches(name, known, 1, 0.75)
                self.error(f"no option {name}" + (f"; did you mean {close[0]}?" if close else ""))
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: {message}\n{self.prog} --help shows all options\n")
