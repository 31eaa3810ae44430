"""GET /status: ranks, memory as the Plan says, and how far each request is; the page shows it.

It reads and changes nothing, and tells no text of anybody's. Speeds are for those who ask twice:
the counters are here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from aiohttp import web
from voltapile.gateway.api.errors import json_response
from voltapile.gateway.api.generate import Generation
from voltapile.gateway.api.services import SERVICES, Services
from voltapile.topology.plan import Plan, RankPlan


async def status(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    plan, health = services.plan, services.engine.health
    body = {
        "model": plan.alias,
        "architecture": plan.architecture,
        "backend": plan.backend,
        "mode": plan.mode,
        "plan": plan.id,
        "context": plan.context,
        "slots": plan.slots,
        "status": health.status,
        "stage": health.stage,
        "fraction": health.fraction,
        "reason": health.reason,
        "ranks": _ranks(services),
        "memory": memory(plan),
        "weights": weights(plan),
        "requests": _requests(services),
        "counters": asdict(services.engine.stats()),
    }
    return json_response(body)


def memory(plan: Plan) -> list[dict[str, Any]]:
    """Planned bytes by purpose of each place: a GPU, host memory of a rank or of all, the file."""
    places: list[dict[str, Any]] = []
    for rank in plan.ranks:
        if _in_vram(rank):
            places.append(_place(rank.device, "vram", [rank.rank], rank.memory))
        of_host = rank.host if _in_vram(rank) else rank.memory
        if of_host:
            places.append(_place(f"host, rank {rank.rank}", "host", [rank.rank], of_host))
    everybody = [rank.rank for rank in plan.ranks]
    if plan.shared:
        places.append(_place("host, shared", "host", everybody, plan.shared))
    if mapped := weights(plan).get("mapped", 0):
        places.append(_place("model file, mapped", "mapped", everybody, {"weights": mapped}))
    return places


def weights(plan: Plan) -> dict[str, int]:
    """Bytes of tensors by the tier that the Plan gives them."""
    tiers: Counter[str] = Counter()
    for placement in plan.tensors.values():
        if placement.ranks:
            tiers[placement.tier] += placement.bytes
    return dict(tiers)


def _place(name: str, tier: str, ranks: list[int], purposes: dict[str, int]) -> dict[str, Any]:
    return {"name": name, "tier": tier, "ranks": ranks, "bytes": purposes}


def _in_vram(rank: RankPlan) -> bool:
    return rank.device.startswith("cuda")


def _ranks(services: Services) -> list[dict[str, Any]]:
    """allocated: what the rank has told, once it has loaded."""
    health, allocated = services.engine.health, services.engine.memory
    loading = {each.rank: each for each in health.ranks}
    found = []
    for rank in services.plan.ranks:
        progress = loading.get(rank.rank)
        is_ready = health.status == "ok"
        stage = progress.stage if progress else "ready" if is_ready else health.stage
        told = allocated.get(rank.rank, {})
        found.append(
            {
                "rank": rank.rank,
                "device": rank.device,
                "node": rank.node,
                "cpus": len(rank.cpus),
                "threads": rank.threads,
                "layers": rank.share.layers,
                "is_part": rank.share.is_part,
                "stage": stage or health.status,
                "fraction": progress.fraction if progress else 1.0 if is_ready else health.fraction,
                "allocated": {purpose: nbytes for purpose, (_, nbytes) in told.items()},
            }
        )
    return found


def _requests(services: Services) -> list[dict[str, Any]]:
    """In the order in which they came."""
    return [_request(each) for each in sorted(services.live, key=lambda each: each.number)]


def _request(generation: Generation) -> dict[str, Any]:
    progress, timings = generation.progress(), generation.timings()
    state = "answer" if generation.has_begun else "prompt"
    return {
        "id": generation.number,
        "state": "waiting" if generation.is_waiting else state,
        "slot": generation.slot,
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": progress["cache"],
        "processed_tokens": progress["processed"],
        "generated_tokens": generation.completion_tokens,
        "most_tokens": generation.sampling.max_position - generation.prompt_tokens,
        "prompt_seconds": progress["time_ms"] / 1000,
        "tokens_per_second": timings["predicted_per_second"],
    }
