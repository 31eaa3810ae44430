"""voltapile plan: a table or the Plan as JSON; mistakes are one line and exit code 1."""

from __future__ import annotations

from pathlib import Path

import pytest
from voltapile.gateway.cli.main import main
from voltapile.topology.plan import from_json

DATA = Path(__file__).parents[2] / "data"
LLAMA = DATA / "golden-mini" / "llama" / "model-f16.gguf"
COMMAND = ["plan", "-m", str(LLAMA), "--backend", "reference"]


def test_json_is_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-c", "1000", "-np", "2", "-t", "1", "-b", "128", "-ctk", "f32", "-ctv", "f32"]
    assert main([*COMMAND, *options, "--alias", "me", "--json"]) == 0
    plan = from_json(capsys.readouterr().out)
    assert (plan.context, plan.slots, plan.batch_tokens, plan.alias) == (1000, 2, 128, "me")
    assert (plan.ranks[0].threads, plan.model) == (1, [str(LLAMA)])


def test_table_for_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--machine", str(DATA / "machines" / "two-sockets.json")]
    assert main([*COMMAND, *machine, "-c", "5000"]) == 0
    out = capsys.readouterr().out
    for text in ("two-sockets", "8 thread(s) on node 1", "5000 tokens for one request", "F16"):
        assert text in out
    assert "225,280.0" in out  # MiB available there
    assert "warning: -c 5000 is more than the trained context of 4096" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "missing.gguf"], "missing.gguf: cannot open: No such file or directory"),
        (
            ["-m", str(LLAMA.parents[1] / "qwen3-dflash2" / "model-f16.gguf")],
            "'dflash'; supported: ",
        ),
        (["-c", "2000000000"], "not enough memory"),
        (["-ctk", "q3"], "-ctk q3: the reference backend has no such cache type; supported: f32"),
        (["--machine", str(LLAMA)], "not a machine"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
