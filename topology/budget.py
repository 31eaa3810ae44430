"""Memory against what it is needed for: how many pages fit, and the message when too little does.

A pool is one memory (a GPU's, or the machine's) and the sizes of all ranks that live in it. Pages
are common to all ranks, so the fullest pool decides their number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from voltapile.topology.memory import MOST_COLUMNS, Sizes
from voltapile.topology.plan import Options, PlanError
from voltapile.topology.spec import Spec

LEAST_CONTEXT = 512  # a smaller one is only planned when asked for


class ShortageError(PlanError):
    """Less memory than needed; whoever catches it says what would help."""


@dataclass(frozen=True)
class Pool:
    """One memory."""

    owner: str
    total: int
    available: int  # margin taken off
    ranks: tuple[Sizes, ...]
    mapped: int = 0  # bytes of the file that should stay in it beside the rest
    is_vram: bool = False

    @property
    def fixed(self) -> int:
        return sum(each.fixed for each in self.ranks)

    def growing(self, columns: int) -> int:
        """What pages, tables and histories of so long a context take."""
        return sum(each.growing(columns) for each in self.ranks)

    def columns(self, resident: bool) -> int:
        """Pages without a window that fit; resident: beside the file too."""
        left = self.available - self.fixed - (self.mapped if resident else 0)
        return max(0, bisect_right(range(MOST_COLUMNS), left, key=self.growing) - 1)

    def part(self, purpose: str) -> int:
        return sum(getattr(each, purpose) for each in self.ranks)


@dataclass(frozen=True)
class Budget:
    """All memories of a Plan."""

    pools: Sequence[Pool]
    margin: int
    page_tokens: int

    def columns(self, resident: bool) -> int:
        return min(pool.columns(resident) for pool in self.pools)

    @property
    def largest(self) -> int:
        """Most tokens that one request could use."""
        return self.columns(resident=False) * self.page_tokens

    @property
    def tightest(self) -> Pool:
        return min(self.pools, key=lambda pool: (pool.columns(False), pool.available - pool.fixed))


def choose_context(
    spec: Spec, budget: Budget, slots: int, options: Options, warnings: list[str]
) -> tuple[int, int]:
    """Context of one request, and columns of pages: at least one full context, up to `slots` of
    them where memory allows, the mapped file's pages counted as taken. Raises PlanError."""
    beside_file = budget.columns(resident=True) * budget.page_tokens
    least = min(spec.context, LEAST_CONTEXT)
    if options.context:
        context = options.context
        if context > spec.context:
            warnings.append(f"-c {context} is more than the trained context of {spec.context}")
    else:
        context = min(spec.context, max(beside_file, least))
        if context < spec.context:
            warnings.append(_less_than_trained(spec, budget, context, beside_file))
    if context > budget.largest:
        raise ShortageError(_shortage(budget, context))
    if context > beside_file:
        mapped = max(pool.mapped for pool in budget.pools)
        warnings.append(
            f"the model's {show(mapped)} do not stay in memory beside the rest; parts of it will "
            "be read from disk again and again"
        )
    one = -(-context // budget.page_tokens)
    return context, max(one, min(slots * one, budget.columns(resident=True)))


def show(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _less_than_trained(spec: Spec, budget: Budget, context: int, beside_file: int) -> str:
    """Why a context that nobody asked for is that small."""
    text = f"the context is {context} of the {spec.context} trained tokens for lack of memory"
    larger = min(spec.context, budget.largest)
    if larger <= context or context > beside_file:  # of which another warning tells
        return text
    mapped = max(pool.mapped for pool in budget.pools)
    return (
        f"{text}; up to -c {larger} would fit, but then the model's {show(mapped)} do not stay in "
        "memory beside it, and parts are read from disk again and again"
    )


def _shortage(budget: Budget, context: int) -> str:
    pool = budget.tightest
    kv = pool.growing(-(-context // budget.page_tokens))
    named = "".join(
        f"{name} {show(pool.part(name))}, "
        for name in ("weights", "state", "checkpoints", "communication")
        if pool.part(name)
    )
    where = "" if len(budget.pools) == 1 else f" on {pool.owner}"
    kept = f"{show(budget.margin)} kept free"
    if kv + pool.fixed <= pool.available + budget.margin:
        kept += "; a smaller --margin would do"
    return (
        f"not enough memory{where}: {show(kv + pool.fixed)} needed ({named}cache for a context of "
        f"{context} {show(kv)}, scratch {show(pool.part('scratch'))}, slots "
        f"{show(pool.part('slots'))}, reserve {show(pool.part('reserve'))}), but "
        f"{show(max(0, pool.available))} available ({kept})"
    )
