"""Which memory each tensor lives in: VRAM, host memory that GPUs read or the CPU computes from, or
the mapped file; by rule, by habit, and, where that does not fit, moved out in a fixed order.

Pure arithmetic; how much each memory holds is told by a Layout's budget.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from voltapile.shm.gguf import Tensor
from voltapile.topology.budget import LEAST_CONTEXT, Budget, show
from voltapile.topology.machine import Machine
from voltapile.topology.overrides import Obeyed, Place, Rule, layer_of, role_of
from voltapile.topology.plan import Backend, Options
from voltapile.topology.spec import Spec

FIT_CONTEXT = 4096  # tokens for which weights are moved out of VRAM, where they must be
CPU_SHARE = 0.7  # of its memory's bandwidth that a CPU reaches when it computes with weights
FAST_LINK = 30e9  # bytes a second from which reading host memory beats a CPU of unknown speed
SHARED_ROOM = 32 << 20  # of /dev/shm, that ranks need to meet
EMBEDDING, TABLE = "token_embd.weight", "per_layer_token_embd.weight"
SHARED = (EMBEDDING, TABLE)  # of which, outside VRAM, one copy serves all ranks

VRAM, PINNED, HOST, MAPPED = Place("vram"), Place("pinned"), Place("host"), Place("mapped")


@dataclass(frozen=True)
class Places:
    """Of every tensor that is used; and the layers whose keys and values are not in VRAM."""

    of: Mapping[str, Place]
    host_layers: frozenset[int] = frozenset()

    def move(self, moved: Mapping[str, Place], layers: frozenset[int] = frozenset()) -> Places:
        return Places({**self.of, **moved}, self.host_layers | layers)


@dataclass(frozen=True)
class Move:
    """Tensors that leave VRAM together."""

    what: str
    names: Sequence[str]
    place: Place
    layers: frozenset[int] = frozenset()  # whose keys and values go with them


BudgetOf = Callable[[Places], Budget]


def usual_places(
    tensors: Mapping[str, Tensor],
    spec: Spec,
    machine: Machine,
    backend: Backend,
    options: Options,
    mode: str,
) -> Places:
    """Without any rule and with memory for everything but what ranks share, which is limited apart.
    Where each of several GPUs would keep the whole token embedding, one copy in host memory serves
    all: a token's row comes over the link in microseconds, and hundreds of MiB of each GPU stay
    free."""
    if not backend.in_vram:
        return Places(dict.fromkeys(tensors, HOST if options.no_mmap else MAPPED))
    room = machine.shared_bytes - SHARED_ROOM if machine.shared_bytes else machine.available_bytes
    found = dict.fromkeys(tensors, VRAM)
    if TABLE in tensors:
        found[TABLE] = PINNED if tensors[TABLE].nbytes <= room else MAPPED
        room -= tensors[TABLE].nbytes if found[TABLE] == PINNED else 0
    if EMBEDDING in tensors and not spec.tied and mode in ("tensor", "experts"):
        found[EMBEDDING] = PINNED if tensors[EMBEDDING].nbytes <= room else VRAM
    return Places(found)


def by_rules(places: Places, rules: Sequence[Rule], obeyed: Obeyed) -> Places:
    """After what rules say."""
    layers = {
        layer_of(name)
        for rule, taken in zip(rules, obeyed.taken, strict=True)
        if not rule.keeps_cache
        for name in taken
    }
    return places.move(obeyed.places, frozenset(layers - {-1}))


def fit(
    places: Places,
    fixed: Mapping[str, Place],
    budget_of: BudgetOf,
    spec: Spec,
    machine: Machine,
    options: Options,
    notes: list[str],
) -> Places:
    """With as much moved out of VRAM as must be for the context, and out of host memory into the
    file where that is full. fixed: what rules have said of, which stays."""
    usual = budget_of(places)
    least = options.context or min(spec.context, LEAST_CONTEXT)
    wanted = options.context or min(spec.context, FIT_CONTEXT)
    needed = -(-wanted // usual.page_tokens)
    if not _holds(usual, -(-least // usual.page_tokens)):
        moves = _moves(places, fixed, spec, machine, options)

        def holds(count: int) -> bool:
            return _holds(budget_of(_moved(places, moves[:count])), needed)

        count = min(len(moves), bisect_left(range(len(moves) + 1), True, key=holds))
        places = _moved(places, moves[:count])
        if count:
            notes.append(_told(moves[:count], wanted))
    return _fit_host(places, fixed, budget_of, notes)


def _moves(
    places: Places, fixed: Mapping[str, Place], spec: Spec, machine: Machine, options: Options
) -> list[Move]:
    """In order: the token embedding, of which a step reads rows; experts layer by layer, of which a
    token needs few; whole layers."""
    free = [name for name, place in places.of.items() if place == VRAM and name not in fixed]
    place = _outside(machine)
    experts: dict[int, list[str]] = {}
    others: dict[int, list[str]] = {}
    for name in free:
        role = role_of(name, spec)
        (experts if role == "experts" else others).setdefault(layer_of(name), []).append(name)
    moves = []
    if EMBEDDING in free and not spec.tied:
        moves.append(Move("the token embedding", [EMBEDDING], PINNED))
    for _, names in sorted(experts.items()):
        moves.append(Move("the experts", names, place))
    if options.gpu_layers < 0:
        for layer, names in sorted(others.items()):
            if layer >= 0:
                kept = frozenset() if place == PINNED else frozenset([layer])
                moves.append(Move("the rest", names, place, kept))
    return moves


def _outside(machine: Machine) -> Place:
    """Whether GPUs read weights from host memory, or the CPU computes with them: the faster."""
    gpus = sum(gpu.host_bandwidth for gpu in machine.gpus)
    nodes = sum(node.bandwidth for node in machine.nodes)
    if not nodes:
        fast = any(gpu.host_bandwidth >= FAST_LINK for gpu in machine.gpus)
        return PINNED if fast else HOST
    return PINNED if min(gpus, nodes) > CPU_SHARE * nodes else HOST


def _moved(places: Places, moves: Sequence[Move]) -> Places:
    moved = {name: move.place for move in moves for name in move.names}
    return places.move(moved, frozenset().union(*(move.layers for move in moves)))


def _holds(budget: Budget, columns: int) -> bool:
    """Whether VRAM holds so many pages."""
    return all(
        pool.available >= pool.fixed + pool.growing(columns)
        for pool in budget.pools
        if pool.is_vram or len(budget.pools) == 1
    )


def _fit_host(
    places: Places, fixed: Mapping[str, Place], budget_of: BudgetOf, notes: list[str]
) -> Places:
    """With host memory's share left in the file from the end on, the n-gram table first."""

    def short(found: Places) -> int:
        pools = [pool for pool in budget_of(found).pools if not pool.is_vram]
        return max((pool.fixed + pool.growing(1) - pool.available for pool in pools), default=0)

    outside = [
        name
        for name, place in places.of.items()
        if place in (PINNED, HOST) and name not in fixed and name != EMBEDDING
    ]
    if len(budget_of(places).pools) == 1 or not outside or short(places) <= 0:
        return places
    order = sorted(outside, key=lambda name: (name != TABLE, -layer_of(name)))

    def left(count: int) -> Places:
        return places.move(dict.fromkeys(order[:count], MAPPED))

    count = bisect_left(range(len(order) + 1), True, key=lambda n: short(left(n)) <= 0)
    count = min(count, len(order))
    notes.append(
        f"host memory is {show(short(places))} short, so {count} tensor(s) stay in the mapped file "
        "and are read from the drive"
    )
    return left(count)


def _told(moves: Sequence[Move], context: int) -> str:
    """What was moved, in a sentence."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for move in moves:
        kinds.setdefault((move.what, str(move.place)), []).append(layer_of(move.names[0]))
    told = []
    for (what, place), layers in kinds.items():
        of = "" if layers[0] < 0 else f" of layer {layers[0]}"
        of = f" of layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else of
        told.append(f"{what}{of} ({place})")
    return f"to hold a context of {context}, VRAM goes without {', '.join(told)}"
