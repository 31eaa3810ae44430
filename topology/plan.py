"""Plan: what runs where and every byte it takes; the only configuration that crosses a process.

Records alone: planner.py makes them from a Spec, a Machine, a Backend and Options. Workers allocate
exactly what a Plan says; running out of memory is a message before anything is loaded.

Two things stand outside what requests get. Page 0 of every cache group is the trash page: it counts
in `pages`, is never handed out, and takes what padding writes. Slot number `slots` is the padding
slot: slot arrays have slots + 1 rows, and the rows that fill up a captured step use the last one.
"""

from __future__ import annotations

import hashlib

import msgspec
from voltapile.topology.endpoint import default_endpoint
from voltapile.topology.share import Share

INDEX_RING = 16  # positions of a page whose index keys are kept before they are pooled


class PlanError(ValueError):
    """What was asked for does not fit or is not supported; names the option that would help."""


class OptionError(PlanError):
    """An option has a value that it may not have, here or anywhere."""


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """A plain description that kernels provides of one implementation of Ops."""

    name: str  # "reference" | "cpu" | "cuda"
    formats: list[str]  # tensor types that it can multiply with, e.g. "Q4_K"
    kv_types: dict[str, tuple[int, int]]  # name -> (values per block, bytes per block)
    page_tokens: int
    max_decode_rows: int  # rows that the row-invariant engine takes in one captured step
    activation_bytes: float  # scratch bytes for each value of a linear's input, its copies included
    reserve_bytes: int  # what the process itself holds: interpreter, libraries, thread stacks
    captures: bool
    in_vram: bool = False  # weights and caches live in a GPU's memory
    workspace_bytes: int = 0  # scratch bytes beside what follows from the model's shapes
    unpacked_bytes: float = 0.0  # scratch bytes for each value of a layer's largest matrix
    choices: dict[str, str] = {}  # what changes bits, for the Plan's choices
    host_reserve_bytes: int = 0  # what the process holds of the host's memory, if in_vram
    group_bytes: int = 0  # what a rank of several keeps for each of them to be written to
    # Of formats that change at load: bytes of a block in the file, and then.
    repacked: dict[str, tuple[int, int]] = {}
    splits_positions: bool = False  # ranks may share out keys and values by position
    most_tokens: int = 0  # of a step, for each residual stream; 0: as many as memory holds
    staged_rows: int = 0  # of a table in the file, that a GPU gets at once; 0: it cannot


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for; 0 means "choose"."""

    context: int = 0  # -c: tokens that one request may use
    slots: int = 0  # -np
    threads: int = 0  # -t
    batch_tokens: int = 512  # -b: most tokens of a Step
    cache_type_k: str = ""
    cache_type_v: str = ""
    margin_bytes: int = 256 << 20
    endpoint: str = ""  # ZeroMQ address of the gateway; "" means an ipc socket named by the Plan
    alias: str = ""  # the name that clients see; "" means the file's
    no_mmap: bool = False  # copy the weights into memory of huge pages instead of mapping the file
    steps_in_flight: int = 0  # Steps that may be under way at once
    ranks: int = 0  # worker processes; 0: one, or one for each GPU that the mode uses
    split_mode: str = ""  # -sm: none | layer | tensor | experts; "" means choose
    checkpoints: int = 32  # --ctx-checkpoints: states of hybrid models that are kept, for each slot
    checkpoint_tokens: int = 4096  # of a prompt between two of them
    checkpoint_bytes: int = -1  # --cache-ram: host memory for them; -1: some of what is free
    rope_scaling: str = ""  # --rope-scaling: none | linear | yarn; "": as the file says
    rope_scale: float = 0.0  # --rope-scale: how many times as far
    rope_original: int = 0  # --yarn-orig-ctx: the context before that
    compress_ratio: int = 0  # --compress-ratio: positions of a block that an indexer chooses
    router_input: str = ""  # f32: not rounded to BF16 where the model's router was trained on that
    tensor_split: list[float] = []  # -ts: proportions of the ranks; [] means equal ones
    kv_split: str = ""  # --kv-split: heads | positions; "" means heads
    islands: list[int] = []  # --islands: of each rank; [] means as the GPUs reach each other
    devices: list[int] = []  # --device: GPUs by their index; [] means those that help
    gpu_layers: int = -1  # -ngl: last layers in VRAM, the output matrix one of them; -1: all
    cpu_moe: int = 0  # --n-cpu-moe: first layers whose experts do not stay in VRAM
    overrides: list[str] = []  # -ot: rules, see overrides.py; the first that matches is obeyed
    fit: bool = True  # move out of VRAM what does not fit and no rule speaks of
    host_bytes: int = 0  # --host-memory: free memory of the host, whatever the probe sees
    vram_bytes: list[int] = []  # --vram: free memory of each GPU, or of all of them


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lives. tier: vram; pinned: host memory that GPUs read; host: memory whose
    CPU computes with it; mapped: the file. split: none | experts | rows | columns. ranks: those
    that keep a part of it; none: it is not used."""

    tier: str
    ranks: list[int]
    bytes: int
    type: str
    split: str = "none"


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of pages. A page holds page_tokens positions of all its layers; position p of a
    slot lies in the page number p // page_tokens of the slot's table, whatever the kind.

    Kind "window": a token at p reads positions p - window + 1 to p, so a row that starts at
    `start` needs the pages from `first_page(start)` on. Those before may belong to another slot
    already in the same Step: Steps run in order, and whatever read them has run. Their ids may
    stay in the table, and page 0 may stand there for those that a reused prefix does not have:
    nothing behind the window is read.
    """

    kind: str
    layers: list[int]
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    key_type: str
    value_type: str
    page_tokens: int
    page_bytes: int
    pages: int
    index_bytes: int = 0  # of each layer's part of page_bytes: what every rank keeps whole
    index_dim: int = 0  # kind "qsa": of the keys by which blocks of index_block positions
    index_block: int = 1  # are chosen

    def first_page(self, start: int) -> int:
        """The number of the first page that a row which starts there reads."""
        return max(0, start - self.window + 1) // self.page_tokens if self.window else 0


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule for placing tensors took."""

    rule: str
    place: str  # vram | pinned | host | mapped | rank N
    tensors: int
    bytes: int


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process. memory: bytes by purpose (weights, kv, state, scratch, slots,
    checkpoints, communication, staging, reserve), in VRAM where the device is a GPU; host: those
    beside it, in memory."""

    rank: int
    share: Share  # what it computes of the model
    page_bytes: list[int]  # of a page of each cache group, as much of it as lies here
    device: str
    node: int
    cpus: list[int]
    threads: int
    memory: dict[str, int]
    mapped_bytes: int  # of the model file; shared page cache, not counted in memory
    host: dict[str, int] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. id: a digest of everything else, so that two sides can compare."""

    version: int = 1
    id: str = ""
    model: list[str]  # paths of the file's shards
    alias: str  # the name that clients see
    architecture: str
    backend: str
    endpoint: str
    context: int
    slots: int
    batch_tokens: int
    buckets: list[int]  # captured decode sizes in rows
    steps_in_flight: int
    answer_rank: int
    ranks: list[RankPlan]
    caches: list[CacheGroup]
    tensors: dict[str, Placement]
    has_states: bool = False  # layers remember of each slot more than pages hold
    checkpoints: int = 0  # copies of slots' states that ranks can keep, beside number 0
    checkpoint_tokens: int = 0  # of a prompt between two of them
    mode: str = "single"  # single | layer | tensor | experts
    islands: list[int] = []  # of each rank, where the user has declared them
    shared: dict[str, int] = {}  # bytes of host memory that all ranks read, by purpose
    staged: dict[str, int] = {}  # page-locked bytes of a rank for rows of a tensor in the file
    overrides: list[Override] = []
    notes: list[str] = []  # what was chosen, and why
    choices: dict[str, str] = {}  # everything that changes bits, named
    warnings: list[str] = []


def unbuilt(plan: Plan) -> str:
    """Why this Plan cannot be carried out yet, though it can be made; "" if it can."""
    if not any(rank.device.startswith("cuda") for rank in plan.ranks):
        return ""
    outside: dict[str, int] = {}
    for name, each in plan.tensors.items():
        is_read = each.tier == "pinned" and name in plan.shared  # a few rows of it, where it lies
        is_read |= name in plan.staged
        if each.tier != "vram" and each.ranks and not is_read:
            outside[each.tier] = outside.get(each.tier, 0) + each.bytes
    if outside:
        told = ", ".join(f"{nbytes / 2**30:.2f} GiB {tier}" for tier, nbytes in outside.items())
        return (
            f"this Plan keeps weights outside VRAM ({told}), which can be planned and not computed "
            "yet: take a smaller model, quantisation or -c, more GPUs, or -ngl 0 for the CPU"
        )
    for rule in plan.overrides:
        if rule.tensors and rule.place.startswith("rank"):
            return f"{rule.rule}: placing tensors on one GPU can be planned and not computed yet"
    return ""


def sealed(unsealed: Plan) -> Plan:
    """With its id, and the address that follows from it."""
    found = plan_id(unsealed)
    endpoint = unsealed.endpoint or default_endpoint(found)
    return msgspec.structs.replace(unsealed, id=found, endpoint=endpoint)


def plan_id(plan: Plan) -> str:
    """The digest of everything but the id. The default address carries the digest of a Plan without
    an address, so it stands for none."""
    bare = _digest(msgspec.structs.replace(plan, id="", endpoint=""))
    if not plan.endpoint or plan.endpoint.endswith(f"/{bare}.sock"):
        return bare
    return _digest(msgspec.structs.replace(plan, id=""))


def to_json(plan: Plan) -> bytes:
    return msgspec.json.encode(plan)


def from_json(data: bytes | str) -> Plan:
    """A Plan that `to_json` wrote, unchanged. Raises PlanError."""
    try:
        found = msgspec.json.decode(data, type=Plan)
    except msgspec.DecodeError as error:
        raise PlanError(f"not a plan: {error}") from None
    if found.version != 1:
        raise PlanError(f"found a plan of version {found.version}, expected 1")
    if found.id != plan_id(found):
        raise PlanError(f"plan {found.id} has been changed: its digest is {plan_id(found)}")
    return found


def _digest(plan: Plan) -> str:
    return hashlib.sha256(msgspec.json.encode(plan, order="sorted")).hexdigest()[:16]
