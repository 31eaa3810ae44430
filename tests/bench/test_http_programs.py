"""The programs under bench/ that talk HTTP still run; their figures are not checked here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def run(program: str, *options: str) -> str:
    done = subprocess.run([sys.executable, str(BENCH / program), *options],
                          capture_output=True, text=True, timeout=100, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_gateway_overhead(mini: Path) -> None:
    model = str(mini / "llama/model-f16.gguf")
    options = ["-m", model, "--tokens", "400", "--pace", "1", "--repeat", "1", "--json"]
    rows = json.loads(run("gateway_overhead.py", *options))
    assert [row["streams"] for row in rows] == [1, 8, 32, 1, 8, 32, "floor"]
    assert [row.get("interval_ms") for row in rows] == [0, 0, 0, 50, 50, 50, None]
    assert all(row["cpu_us_per_token"] > 0 for row in rows)
    assert all(row["tok_s"] > 0 for row in rows[:6])
    assert 0 < rows[0]["delay_us"] < 1e5


@pytest.mark.slow
@pytest.mark.model
def test_http_stream(smollm2: Path) -> None:
    options = ["-m", str(smollm2), "-t", "1", "--tokens", "80", "--rounds", "1", "--json"]
    result = json.loads(run("http_stream.py", *options))
    assert result["one_tok_s"] > 0
    assert result["joint_tok_s"] > 0


@pytest.mark.slow
def test_idle_streams(mini: Path) -> None:
    model = str(mini / "llama/model-f16.gguf")
    row = json.loads(run("idle_streams.py", "-m", model, "--streams", "40", "--seconds", "1",
                         "--json"))  # fmt: skip
    assert row["streams"] == 40
    assert row["opened_mb"] < 100


@pytest.mark.slow
def test_soak(mini: Path) -> None:
    model = str(mini / "qwen35moe/model-f16.gguf")
    first, *_, last = run("soak.py", "-m", model, "--minutes", "0.1").splitlines()
    assert first.startswith("0 requests: ")
    assert "'200': " in last


@pytest.mark.slow
@pytest.mark.model
def test_schema_output(smollm2: Path) -> None:
    options = ["-m", str(smollm2), "--tokens", "60", "--rounds", "1", "--json"]
    row = json.loads(run("schema_output.py", *options))
    assert row["free_tok_s"] > 0
    assert row["bound_tok_s"] > 0
