"""GET /health, /version and /metrics: for load balancers, supervisors and Prometheus."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aiohttp import web
from voltapile.gateway.api.errors import json_response
from voltapile.gateway.api.openapi import VERSION
from voltapile.gateway.api.services import SERVICES
from voltapile.gateway.engine import EngineUnavailable, Health
from voltapile.gateway.gather import gather
from voltapile.gateway.metrics import CONTENT_TYPE


async def health(request: web.Request) -> web.Response:
    """200 when the engine takes requests, else 503 and why."""
    now = request.app[SERVICES].engine.health
    if now.status == "ok":
        return json_response({"status": "ok"})
    retry = {"Retry-After": str(EngineUnavailable("").retry_after)}
    return json_response(_reasons(now), status=503, headers=retry)


async def version(request: web.Request) -> web.Response:
    return json_response({"version": VERSION})


async def metrics_text(request: web.Request) -> web.Response:
    """The gateway's own, and those of the workers that it can reach."""
    services = request.app[SERVICES]
    body = services.metrics.render() + await gather(services.engine.status_ports)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def _reasons(now: Health) -> dict[str, Any]:
    if now.status == "failed":
        return {"status": "failed", "reason": now.reason}
    body: dict[str, Any] = {"status": now.status, "stage": now.stage, "fraction": now.fraction}
    if now.reason:
        body["reason"] = now.reason
    if now.ranks:
        body["ranks"] = [asdict(each) for each in now.ranks]
    return body
