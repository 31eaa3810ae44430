"""Options that are unknown or wrong: one line first, and exit code 2."""

from __future__ import annotations

import pytest
from voltapile.gateway.cli.main import COMMANDS, main, parser_for


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-m", "x", "-md", "draft.gguf"], "no option -md"),  # not -m d
        (["-m", "x", "--ctx", "5"], "no option --ctx"),  # no abbreviation
        (["-m", "x", "--ctx-sizes=5"], "no option --ctx-sizes; did you mean --ctx-size?"),
        (["-m", "x", "-c", "many"], "argument -c/--ctx-size: invalid int value: 'many'"),
        (["-m", "x", "y"], "unrecognized arguments: y"),
        ([], "the following arguments are required: -m/--model"),
    ],
)
def test_one_line_first(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *words])
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"voltapile serve: {told}", "voltapile serve --help shows all options"]


def test_values_that_look_like_options() -> None:
    args = parser_for("serve").parse_args(["-m", "x", "-c8", "-ngl", "-1", "--alias=-a"])
    assert (args.ctx_size, args.gpu_layers, args.alias) == (8, -1, "-a")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_once_what_an_option_takes(command: str) -> None:
    text = parser_for(command).format_help()
    options = text[text.index("options:") :]
    for line in options.splitlines():
        if line.startswith("  -"):
            names = line.split("  ")[1]
            assert names.count(" ") - names.count(", ") <= 1, line
