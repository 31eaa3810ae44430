"""Command lines of llama-server's users."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from voltapile.gateway.cli import serve
from voltapile.gateway.cli.llama_server import request_defaults, template_source
from voltapile.gateway.cli.main import main, parser_for
from voltapile.gateway.cli.parser import UsageError
from voltapile.gateway.template import CHATML

USUAL = (
    "-m x.gguf -c 8192 -ngl 99 -fa on -b 2048 -ub 512 --jinja --mlock --no-warmup --embeddings "
    "--metrics --slots -cb -t 8 -tb 8 -a me --timeout 600 --threads-http 4 --no-context-shift "
    "-v -lv 3 --log-colors off --log-timestamps --numa isolate --temp 0.7 --top-k 20 --top-p 0.8 "
    "--min-p 0 --seed 4 --reasoning-format none --reasoning-budget 0"
)


def args_of(*words: str):
    return parser_for("serve").parse_args(["-m", "x", *words])


def test_a_usual_command_line(caplog: pytest.LogCaptureFixture) -> None:
    args = parser_for("serve").parse_args(USUAL.split())
    assert list(args.no_effect) == [
        "-fa", "--jinja", "--mlock", "--no-warmup", "--embeddings", "--slots", "-cb", "-tb",
        "--timeout", "--threads-http", "--no-context-shift", "-lv", "--log-colors",
        "--log-timestamps", "--numa",
    ]  # fmt: skip
    assert request_defaults(args) == {
        "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0, "seed": 4,
        "reasoning_format": "none", "reasoning_budget": 0,
    }  # fmt: skip
    assert (args.verbose, args.alias, args.ubatch_size) == (True, "me", 512)


def test_what_has_no_effect_is_told(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        assert main(["plan", "-m", "/nonexistent", "-fa", "--mlock"]) == 1
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in told] == [
        "-fa has no effect", "--mlock has no effect",
    ]  # fmt: skip


def test_flash_attention_takes_a_word_or_none() -> None:
    for words in (["-fa"], ["-fa", "auto"], ["--flash-attn", "off", "--jinja"], ["-fa", "--jinja"]):
        assert args_of(*words).no_effect


@pytest.mark.parametrize(
    "words", [["--temp", "-1"], ["--top-p", "-1"], ["--min-p", "nan"], ["--repeat-last-n", "0"]]
)
def test_a_default_that_no_request_may_have(words: list[str]) -> None:
    with pytest.raises(UsageError, match="a default of requests is wrong"):
        request_defaults(args_of(*words))


def test_templates(tmp_path: Path) -> None:
    assert template_source(args_of()) == ""
    assert template_source(args_of("--chat-template", "chatml")) == CHATML
    assert template_source(args_of("--chat-template", "{{ 1 }}")) == "{{ 1 }}"
    (tmp_path / "t").write_text("{{ 2 }}")
    assert template_source(args_of("--chat-template-file", str(tmp_path / "t"))) == "{{ 2 }}"
    with pytest.raises(UsageError, match="llama3: neither a Jinja template nor chatml"):
        template_source(args_of("--chat-template", "llama3"))
    with pytest.raises(UsageError, match="contradict"):
        template_source(args_of("--chat-template", "{", "--chat-template-file", "x"))


def test_a_template_instead_of_the_files(mini: Path) -> None:
    plan = SimpleNamespace(model=[str(mini / "llama/model-f16.gguf")])
    args = args_of("--chat-template", "{% for m in messages %}{{ m.content }}!{% endfor %}")
    _, template = serve.Server(plan, args, starts_workers=False)._language()
    assert template is not None
    assert template.render([{"role": "user", "content": "a"}]) == "a!"
    template.close()
    args = args_of("--chat-template", "{% for %}")
    with pytest.raises(UsageError, match="--chat-template: "):
        serve.Server(plan, args, starts_workers=False)._language()
