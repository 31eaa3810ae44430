"""The dispatcher: what its help shows."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from voltapile.gateway.cli.main import COMMANDS, main, parser_for, told


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


def test_errors_of_the_system_are_told_without_their_number() -> None:
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "/nonexistent/x")
    assert told(missing) == "/nonexistent/x: No such file or directory"
    assert told(OSError(errno.EADDRINUSE, "port 80: in use")) == "port 80: in use"
    assert told(OSError("the model is not there")) == "the model is not there"
    assert told(ValueError("-c 0")) == "-c 0"


def test_a_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    path = os.path.join(os.devnull, "x")
    assert main(["probe", "-o", path]) == 1
    assert capsys.readouterr().err.endswith(f"voltapile: {path}: Not a directory\n")


@pytest.mark.parametrize("files", [20, 24, 32, 63])
@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_too_few_open_files_are_told_before_anything_fails(
    mini: Path, command: str, files: int
) -> None:
    model = str(mini / "llama/model-f16.gguf")
    code = "import sys; from voltapile.gateway.cli.main import main; sys.exit(main(sys.argv[1:]))"
    asked = [sys.executable, "-c", code, command, "-m", model, "--port", "0", "--backend", "cpu"]
    done = subprocess.run(
        asked, capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"voltapile: ulimit -n is {files}: a server needs 64 open files")
    assert line.endswith("ulimit -n 4096, or LimitNOFILE=4096 in its unit")
