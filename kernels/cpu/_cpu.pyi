"""The C++ module (csrc/module.cpp). Arrays are C-contiguous numpy arrays and never converted."""

from collections.abc import Sequence

import numpy as np
from voltapile.kernels.ops import Batch, SlotState, StepOutput

Array = np.ndarray

class Matrix:
    def __init__(
        self, data: Array, type: int, rows: int, cols: int, factors: Array | None = None
    ) -> None: ...

class KvCache:
    def __init__(
        self,
        keys: Array,
        values: Array,
        pages: int,
        kv_heads: int,
        page_tokens: int,
        key_dim: int,
        value_dim: int,
        key_type: str,
        value_type: str,
    ) -> None: ...

class Recording:
    def __len__(self) -> int: ...

class Group:
    def __init__(
        self,
        memory: Array,
        rank: int,
        ranks: int,
        room: int,
        seconds: float,
        abort: int,
        waits_for: int,
        heartbeat: int,
        crowded: bool,
    ) -> None: ...
    @staticmethod
    def bytes(ranks: int, room: int) -> int: ...

class FileRows:
    """Rows of a matrix in an open file, which is closed with it; see csrc/file_rows.h."""

    def __init__(
        self, descriptor: int, offset: int, rows: int, row_bytes: int, threads: int
    ) -> None: ...
    def reading(self, numbers: int, count: int, out: int) -> tuple[int, int]:
        """Addresses of a function in C and of its argument: a call reads the rows whose numbers
        (int64) lie at `numbers` then. Both stay for ever, and so does the open file."""

    def expect(self, numbers: Array) -> None: ...
    @property
    def fault(self) -> int: ...

class Engine:
    """Runs each op at once, or appends it between record() and recorded()."""

    def __init__(self, threads: int, cpus: Sequence[int], heartbeat: int, abort: int) -> None: ...
    @property
    def threads(self) -> int: ...
    def record(self) -> None: ...
    def recorded(self) -> Recording: ...
    def replay(self, recording: Recording) -> None: ...
    def begin(self, batch: Batch, state: SlotState) -> None: ...
    def sample(
        self, logits: Array, batch: Batch, state: SlotState, out: StepOutput, adjusted: Array
    ) -> None: ...
    def rms_norm(
        self, x: Array, weight: Array, out: Array, eps: float, accumulate: bool
    ) -> None: ...
    def softcap(self, x: Array, cap: float) -> None: ...
    def rope_angles(self, positions: Array, inv_freq: Array, out: Array, scale: float) -> None: ...
    def rope(self, x: Array, angles: Array, head_dim: int, neox: bool) -> None: ...
    def store_kv(
        self, cache: KvCache, k: Array, v: Array, slots: Array, positions: Array, table: Array
    ) -> None: ...
    def attention(
        self,
        q: Array,
        out: Array,
        cache: KvCache,
        slots: Array,
        positions: Array,
        table: Array,
        head_map: Sequence[int],
        scale: float,
        window: int,
        softcap: float,
        weights: Array | None,
    ) -> None: ...
    def gather(self, x: Array, index: Array | None, out: Array, cols: int) -> None: ...
    def embed(self, table: Matrix, tokens: Array, out: Array, scale: float) -> None: ...
    def linears(
        self,
        x: Array,
        tokens: int,
        matrices: Sequence[Matrix],
        biases: Sequence[Array | None],
        outs: Sequence[Array],
        accumulate: bool,
        quantised: Array,
    ) -> None: ...
    def glu(
        self,
        x: Array,
        tokens: int,
        gate: Matrix,
        up: Matrix,
        gate_bias: Array | None,
        up_bias: Array | None,
        gelu: bool,
        out: Array,
        quantised: Array,
    ) -> None: ...
    def join(self, group: Group) -> None: ...
    def all_reduce(self, part: Array | None, out: Array, accumulate: bool) -> None: ...
    def all_gather(self, part: Array | None, out: Array, widths: Sequence[int]) -> None: ...
    def broadcast(self, data: Array, source: int) -> None: ...
    def send(self, x: Array, target: int) -> None: ...
    def receive(self, x: Array, source: int) -> None: ...
    def place(self, x: Array, out: Array, offset: int) -> None: ...
    def take(self, x: Array, out: Array, offset: int) -> None: ...
    def keep(
        self,
        positions: Array,
        slots: Array,
        seen: Array,
        stored: Array,
        stored_slots: Array,
        part: int,
        parts: int,
        run: int,
        padding: int,
    ) -> None: ...
    def weigh(self, o: Array, weights: Array, all_weights: Array) -> None: ...
    def round_bf16(self, x: Array, out: Array) -> None: ...
    def route(
        self, logits: Array, generated: int, chosen: Array, weights: Array, counts: Array
    ) -> None: ...
    def experts(
        self,
        x: Array,
        chosen: Array,
        weights: Array,
        matrices: Sequence[Matrix],
        count: int,
        first: int,
        out: Array,
        accumulate: bool,
        quantised: Array,
        inner: Array,
        inner_quantised: Array,
        outputs: Array,
        lists: Array,
    ) -> None: ...
    def silu(self, x: Array, scale: float) -> None: ...
    def gate(self, y: Array, gates: Array) -> None: ...
    def gate_rows(self, y: Array, x: Array, weight: Array) -> None: ...
    def split_heads(self, x: Array, width: int, first: Array, second: Array) -> None: ...
    def delta_net(
        self,
        inputs: Sequence[Array],
        weights: Sequence[Array],
        key_head_of: Sequence[int],
        key_heads: int,
        eps: float,
        gates_by_sigmoid: bool,
        history: tuple[Array, Array, Array],
        state: Sequence[Array],
        batch: Batch,
        out: Array,
    ) -> None: ...
    def streams(self, x: Array, out: Array) -> None: ...
    def stream_norm(self, x: Array, weight: Array, width: int, eps: float, out: Array) -> None: ...
    def stream_mix(self, x: Array, gates: Array, out: Array) -> None: ...
    def stream_add(self, x: Array, inject: Array, y: Array) -> None: ...
    def ngram_rows(
        self,
        batch: Batch,
        multipliers: Sequence[int],
        moduli: Sequence[int],
        offsets: Sequence[int],
        boundary: int,
        rows: Array,
    ) -> None: ...
    def embed_rows(self, table: Matrix, rows: Array, out: Array) -> None: ...
    def ngram_add(
        self,
        x: Array,
        key: Array,
        value: Array,
        weights: Sequence[Array],
        dilation: int,
        history: tuple[Array, Array, Array],
        batch: Batch,
        eps: float,
        added: Array,
        normed: Array,
    ) -> None: ...
    def index_store(
        self,
        ring: Array,
        pooled: Array,
        page_tokens: int,
        block: int,
        keys: Array,
        norm: Array,
        inv_freq: Array,
        scale: float,
        eps: float,
        slots: Array,
        positions: Array,
        table: Array,
    ) -> None: ...
    def choose_blocks(
        self,
        ring: Array,
        pooled: Array,
        page_tokens: int,
        block: int,
        q: Array,
        heads: int,
        slots: Array,
        positions: Array,
        table: Array,
        scores: Array,
        chosen: Array,
        counts: Array,
    ) -> None: ...
    def attention_to(
        self,
        q: Array,
        out: Array,
        cache: KvCache,
        chosen: Array,
        counts: Array,
        block: int,
        slots: Array,
        positions: Array,
        table: Array,
        head_map: Sequence[int],
        scale: float,
        nodes: Array,
    ) -> None: ...

def chosen_node_floats(
    cache: KvCache,
    chosen: Array,
    counts: Array,
    block: int,
    slots: Array,
    positions: Array,
    table: Array,
    head_map: Sequence[int],
) -> int: ...
def is_supported(type: int) -> bool: ...
def unpack_to(type: int, data: Array, out: Array) -> None: ...
def quantised_bytes(tokens: int, cols: int) -> int: ...
def kv_pitch(page_tokens: int) -> int: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...
