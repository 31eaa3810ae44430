"""What a step writes on its way, and what a sequence keeps beside its pages: bytes by shape.

Upper bounds, because workers allocate what the Plan says and nothing else. A = the bytes that a
linear's input costs again in the backend's own form; all arrays are float32. Heads and columns are
those of the rank's Share. Formulas of models that cannot be computed yet are estimates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from voltapile.topology.share import Share
from voltapile.topology.spec import Spec

if TYPE_CHECKING:
    from voltapile.topology.plan import Backend

ALLOCATION_BYTES = 64  # alignment of each scratch array
COUNTER_BYTES = 256  # alignment of a layer's counters
LAYER_ARRAYS = 64  # more than a layer and the ends of a step allocate
LONGEST_BLOCK = 256  # values of a quantisation block, of which ranks may share one
CHUNK = 64  # tokens that a delta net computes together
WINDOW = 8  # tokens of a draft that may be taken back, and whose inputs are kept for that
SCORES_BYTES = 64 << 20  # of qsa: scores of some tokens against all blocks


def scratch_bytes(spec: Spec, backend: Backend, share: Share, batch: int, slots: int) -> int:
    """Most scratch memory of a step of T tokens and R sampled rows.

    A layer's mixer (attention or delta net) and its feed-forward net take turns in one place.

        ends    4 T (D + rope) + (4 + A) T D + 4 T D    residual, angles, sampled rows, their norm
                + 4 R (2 V + V')                        logits, the sampler's copy, the rank's part
        streams 4 T (3 S D + rank)                      residual streams, their norm, gates

    V' = the rank's rows of the output matrix. R is slots, but a prompt's probabilities take hidden
    rows of all T tokens, so the ends count T of them.
    """
    tokens = max(batch, slots)
    width, own = spec.width, 4.0 + backend.activation_bytes
    ropes = spec.rope.dims + (spec.rope_window.dims if spec.rope_window else 0)
    ends = 4 * (width + ropes) + own * width + 4 * width
    if spec.streams > 1:
        ends += 4 * (3 * spec.streams * width + spec.stream_rank)
    mixer = max(_attention(spec, share, own), _delta_net(spec, share, own))
    layer = max(mixer, _dense_ffn(spec, share, own) if not spec.experts else 0.0)
    layer = max(layer, _experts(spec, share, own))
    vocab = _size(share.vocab)
    logits = slots * (2 * spec.vocab + (vocab if share.is_part else 0)) if share.answers else 0
    unpacked = backend.unpacked_bytes * width * _widest(spec, share)
    fixed = LAYER_ARRAYS * ALLOCATION_BYTES + backend.workspace_bytes
    fixed += SCORES_BYTES if spec.indexer else 0
    return int(tokens * (ends + layer) + 4 * logits + unpacked) + fixed


def state_bytes(spec: Spec, share: Share) -> int:
    """What one slot keeps beside its pages: states of delta nets and convolutions, and the inputs
    of tokens that may be taken back."""
    total = 0
    if spec.delta:
        dim = spec.delta.head_dim
        layers = len(set(spec.delta.layers) & set(share.layers))
        values, channels = len(share.value_heads), _channels(spec, share)
        state = values * dim * dim + (spec.delta.conv_kernel - 1) * channels
        total += layers * (4 * (state + WINDOW * (channels + 2 * values)) + ALLOCATION_BYTES)
    if spec.ngrams and spec.ngrams.layer in share.layers:
        rows = (spec.ngrams.conv_kernel - 1) * spec.ngrams.size + WINDOW
        total += 4 * rows * spec.streams * spec.width + ALLOCATION_BYTES
    if spec.indexer:
        layers = sum(len(set(n.layers) & set(share.layers)) for n in spec.caches if n.index_dim)
        total += 4 * layers * (spec.indexer.block + WINDOW) * spec.indexer.key_dim
    return total


def counter_bytes(spec: Spec, share: Share) -> int:
    """How often each expert of a layer was chosen, for prompts and for generated tokens."""
    if not spec.experts:
        return 0
    each = -(-16 * spec.experts.count // COUNTER_BYTES) * COUNTER_BYTES
    return len(share.layers) * each


def _attention(spec: Spec, share: Share, own: float) -> float:
    """For each token:

        (4 + A) D                                norm
        + 4 (2 q + 2 k + v) + (4 + A) o          projections, norms of heads, output
        + (4 + A) o'                             output within whole blocks of columns
        + 4 H (v_dim + 2) + 4 D                  partial sums, output before its norm
        + 12 q + 4 (index queries + chosen)      gates, queries and gates apart; qsa
        + 4 H' (k_dim + 2 v_dim + parts + 3)     all heads' queries and answers, of runs

    q, o = H * key_dim, H * value_dim; k, v alike for KV heads.
    """
    heads, kv_heads = _size(share.heads), _size(share.kv_heads)
    q, k = heads * spec.key_dim, kv_heads * spec.key_dim
    o, v = heads * spec.value_dim, kv_heads * spec.value_dim
    found = own * spec.width + 4 * (2 * q + 2 * k + v) + own * o
    found += own * (o + LONGEST_BLOCK) if share.is_part else 0
    found += 4 * heads * (spec.value_dim + 2) + 4 * spec.width
    found += 12 * q if spec.has_output_gate else 0
    if share.kv_runs:
        found += 4 * spec.heads * (spec.key_dim + 2 * spec.value_dim + share.kv_runs.parts + 3)
    if spec.indexer:
        indexer = spec.indexer
        found += 4 * (indexer.heads * indexer.key_dim + indexer.top_k + indexer.block)
    return found


def _delta_net(spec: Spec, share: Share, own: float) -> float:
    """Norm, projections, convolution, gates, the chunk's matrices for each head, output."""
    if not spec.delta:
        return 0.0
    heads, dim, channels = len(share.value_heads), spec.delta.head_dim, _channels(spec, share)
    inner = heads * dim
    projections = 2 * channels + 2 * inner + 4 * heads
    chunk = heads * (CHUNK + 3 * dim)
    return own * spec.width + 4 * (projections + chunk + spec.width) + own * inner


def _dense_ffn(spec: Spec, share: Share, own: float) -> float:
    """Norm, gate, up, their product, output: (4 + A) D + 8 F + (4 + A) F + 4 D."""
    ffn = _size(share.ffn)
    return own * spec.width + 8 * ffn + own * ffn + 4 * spec.width


def _experts(spec: Spec, share: Share, own: float) -> float:
    """Norm, router, and for each expert of a token, at worst all of them here: gate, up, product
    and output; the shared expert."""
    if not spec.experts:
        return 0.0
    used = min(spec.experts.used, _size(share.experts))
    ffn, shared = _size(share.expert_ffn), _size(share.shared_ffn)
    one = 8 * ffn + own * ffn + 4 * spec.width
    router = 8 * spec.experts.count + 16 * spec.experts.used
    return own * spec.width + router + used * one + 8 * shared + own * shared + 8 * spec.width


def _channels(spec: Spec, share: Share) -> int:
    assert spec.delta is not None
    return spec.delta.head_dim * (2 * len(share.key_heads) + len(share.value_heads))


def _widest(spec: Spec, share: Share) -> int:
    """Rows or columns beside D of the largest matrix that is unpacked as a whole."""
    heads = _size(share.heads)
    found = [_size(share.ffn), heads * spec.key_dim, heads * spec.value_dim]
    if spec.delta:
        found.append(_channels(spec, share))
    return max(found)


def _size(part: tuple[int, int]) -> int:
    return part[1] - part[0]
