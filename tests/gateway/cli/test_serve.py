"""voltapile serve: the line to paste, what it hands on (running: tests/gateway/test_serve.py)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from voltapile.gateway.cli import serve
from voltapile.gateway.cli.main import parser_for
from voltapile.gateway.cli.serve import Server
from voltapile.topology.plan import Plan

URL = "http://127.0.0.1:8080"


@pytest.mark.parametrize(
    ("can_chat", "path", "field"),
    [(True, "/v1/chat/completions", "messages"), (False, "/v1/completions", "prompt")],
)
def test_the_example_is_one_that_the_model_can_answer(
    mini: Path, plan_for: Callable[..., Plan], can_chat: bool, path: str, field: str
) -> None:
    model = mini / "llama/model-f16.gguf"
    args = parser_for("serve").parse_args(["-m", str(model), "--api-key", "k"])
    server = Server(plan_for(model), args, starts_workers=True)
    server.can_chat = can_chat
    words = shlex.split(server._example(URL))
    assert words[:3] == ["curl", "-s", URL + path]
    assert "Authorization: Bearer KEY" in words
    assert set(json.loads(words[-1])) == {field, "temperature"}


@pytest.mark.parametrize(("options", "has_page"), [([], True), (["--no-webui"], False)])
def test_the_page_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, options: list[str], has_page: bool
) -> None:
    args = parser_for("serve").parse_args(["-m", "a.gguf", *options])
    server = Server(SimpleNamespace(), args, starts_workers=True)
    monkeypatch.setattr(server, "_language", lambda: (None, None))
    monkeypatch.setattr(serve.gc, "freeze", lambda: None)
    monkeypatch.setattr("voltapile.gateway.api.app.make_app", lambda *_, **named: named)
    assert server._app(None)["webui"] is has_page
