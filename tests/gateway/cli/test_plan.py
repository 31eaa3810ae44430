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
    assert "225,280" in out  # MiB available there
    assert "warning: -c 5000 is more than the trained context of 4096" in out


def test_no_context_is_offered_that_the_model_does_not_reach(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = ["--machine", str(DATA / "machines" / "two-sockets.json")]
    assert main([*COMMAND, *machine]) == 0
    assert "4096 tokens for one request; trained: 4096; memory holds " in capsys.readouterr().out
    assert main([*COMMAND, "--host-memory", "518M"]) == 0
    out = capsys.readouterr().out
    assert "the largest that fits: " in out
    assert "of the 4096 trained tokens for lack of memory" in out


GPUS = ["--machine", str(DATA / "machines" / "ac922-6xv100-16gb.json"), "--backend", "cuda"]
MOE = DATA / "golden-mini" / "qwen3moe" / "model-f16.gguf"


def test_several_gpus_rules_and_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "-m", str(MOE), *GPUS, "--ranks", "2", "-ot", "experts[0]=host,blk.9=CPU"]
    assert main(command) == 0
    out = capsys.readouterr().out
    for text in (
        "mode experts: each rank holds some experts",
        "cuda:1", "experts 5-9", "heads 3-5", "reserve", "host",
        "-ot experts[0]=host",
        "arithmetic, not measured",
        "steps in flight: 2",
        "warning: -ot blk.9=CPU: matches no tensor of this model",
    ):  # fmt: skip
        assert text in out, text


def test_a_plan_for_others_than_this_machine_says_why_it_cannot_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["-m", str(LLAMA), *GPUS, "--ranks", "1", "-ngl", "2"]
    assert main(["plan", *command]) == 0
    assert "not to be loaded: this Plan keeps weights outside VRAM" in capsys.readouterr().out
    assert main(["serve", *command]) == 1
    err = capsys.readouterr().err
    assert "keeps weights outside VRAM" in err
    assert err.count("\n") == 1


def test_what_does_not_fit_is_not_moved_where_it_would_be_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = DATA / "machines" / "x86-2xv100-16gb.json"
    command = ["-m", str(LLAMA), "--machine", str(machine), "--backend", "cuda", "--ranks", "1"]
    command += ["--vram", "1350M", "--margin", "0", "-c", "262144", "-np", "1", "-b", "128"]
    assert main(["plan", *command]) == 0
    assert "VRAM goes without the rest of layers 0 to" in capsys.readouterr().out
    assert main(["serve", *command]) == 1
    err = capsys.readouterr().err
    assert "not enough memory on GPU 0" in err
    assert "--fit" not in err  # would not help yet


def test_a_saved_plan_is_refused_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "-m", str(LLAMA), *GPUS, "-ngl", "2", "--json"]) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    for command in ("worker", "gateway"):
        assert main([command, "--plan", str(path)]) == 1
        assert "keeps weights outside VRAM" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*GPUS, "-ot", "(=CPU"], "is no regular expression"),
        ([*GPUS, "-ot", "x=moon"], "there is no place 'moon'"),
        ([*GPUS, "-ts", "1,1"], "-ts 1,1: 2 parts for 6 rank(s)"),
        ([*GPUS, "-ts", "0,0,0,0,0,0"], "all parts are 0"),
        ([*GPUS, "-sm", "experts"], "a llama model has no experts; use -sm tensor or layer"),
        ([*GPUS, "--n-cpu-moe", "3"], "a llama model has no experts"),
        ([*GPUS, "--vram", "1M,2M"], "--vram: 2 sizes for 6 GPUs"),
        ([*GPUS, "--vram", "1M"], "not enough memory"),
        (["-m", "missing.gguf"], "missing.gguf: cannot open: No such file or directory"),
        (
            ["-m", str(LLAMA.parents[1] / "qwen3-dflash2" / "model-f16.gguf")],
            "'dflash'; supported: ",
        ),
        (["-c", "2000000000"], "not enough memory"),
        (["-c", "5"], "-c 5: expected 32 at least, or 0: as trained"),
        (["-m", ""], "-m: no file is named"),
        (["-ctk", "q3"], "-ctk q3: the reference backend has no such cache type; supported: f32"),
        (["--machine", str(LLAMA)], "not a machine"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """2: the options are wrong; 1: a file or a machine is."""
    others = ("not enough memory", "cannot open", "supported: ", "not a machine")
    is_option = not any(each in message for each in others) or "-ctk" in message
    assert main([*COMMAND, *arguments]) == (2 if is_option else 1)
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_plan_is_written_if_it_can_be_carried_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    argv = [*COMMAND, "--ranks", "2", "-o", str(path), "--endpoint", "ipc:///run/x/y.sock"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "systemctl enable voltapile-worker@0 voltapile-worker@1" in out
    plan = from_json(path.read_bytes())
    assert (len(plan.ranks), plan.endpoint) == (2, "ipc:///run/x/y.sock")
    path.unlink()
    assert (
        main(["plan", "-m", str(LLAMA), *GPUS, "--ranks", "1", "-ngl", "2", "-o", str(path)]) == 1
    )
    assert not path.exists()
