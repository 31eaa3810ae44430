"""Crew: the workers of a Plan as the gateway hears of them, one for each rank.

Who has loaded, how far the others are, and what memory each has taken. Pure bookkeeping: it decides
nothing, and knows neither sockets nor requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from voltapile.topology.plan import Plan
from voltapile.workers.protocol import Ready, Stats

UNHEARD = "waiting for the worker"


@dataclass(frozen=True)
class Progress:
    """How far one rank is. stage "ready": it has loaded."""

    rank: int
    stage: str
    fraction: float


class Crew:
    """names: who is spoken to, in order of rank; `answers` is the one whose Results count."""

    def __init__(self, plan: Plan) -> None:
        self.names = [f"text-{rank.rank}" for rank in plan.ranks]
        self.answers = self.names[plan.answer_rank]
        self.memory: dict[int, dict[str, tuple[int, int]]] = {}  # planned and allocated bytes
        self.ports: dict[int, int] = {}  # of each rank's own /metrics, on its machine
        self._ready: dict[str, int] = {}  # name -> instance
        self._stages: dict[str, tuple[str, float]] = {}

    @property
    def is_complete(self) -> bool:
        return len(self._ready) == len(self.names)

    @property
    def is_empty(self) -> bool:
        return not self._ready

    def has(self, name: str) -> bool:
        return name in self._ready

    def is_known(self, ready: Ready) -> bool:
        """Whether that very process has been ready before."""
        return self._ready.get(ready.name) == ready.instance

    def take(self, ready: Ready) -> None:
        self._ready[ready.name] = ready.instance

    def hear(self, stats: Stats) -> None:
        """A worker tells how far it is, or what it has allocated."""
        stage, fraction = stats.values.get("stage"), stats.values.get("fraction")
        if isinstance(stage, str) and isinstance(fraction, int | float):
            self._stages[stats.name] = stage, float(fraction)
        port = stats.values.get("status port")
        if isinstance(port, int | float) and stats.name in self.names:
            self.ports[self.names.index(stats.name)] = int(port)
        memory = {
            purpose: (int(planned), int(stats.values.get(f"allocated {purpose}", 0)))
            for key, planned in stats.values.items()
            if (purpose := key.removeprefix("planned ")) != key and not isinstance(planned, str)
        }
        if memory:
            self.memory[self.names.index(stats.name)] = memory

    def forget(self) -> None:
        """All are started anew."""
        self._ready.clear()
        self._stages.clear()
        self.ports.clear()

    def progress(self) -> list[Progress]:
        """Of each rank."""
        found = []
        for rank, name in enumerate(self.names):
            stage, fraction = self._stages.get(name, (UNHEARD, 0.0))
            found.append(Progress(rank, "ready", 1.0) if self.has(name) else
                         Progress(rank, stage, fraction))  # fmt: skip
        return found

    def slowest(self) -> tuple[str, float]:
        """Stage and fraction of the first rank that is not ready; named where there are several."""
        late = next((each for each in self.progress() if not self.has(self.names[each.rank])), None)
        if late is None:
            return "ready", 1.0
        where = f" (rank {late.rank} of {len(self.names)})" if len(self.names) > 1 else ""
        return f"{late.stage}{where}", late.fraction
