"""Architecture "llama": pre-norm decoder, grouped-query attention, SwiGLU.

Attributes are named after the GGUF tensors. Knows Ops and Spec; neither backend nor ranks.
"""

from __future__ import annotations

from voltapile.kernels.ops import Ops
from voltapile.topology.share import Share
from voltapile.topology.spec import Spec
from voltapile.workers.models.blocks import Decoder, PreNormBlock, Weights


class Llama(Decoder):
    def block(
        self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops
    ) -> PreNormBlock:
        return PreNormBlock(spec, share, weights, layer, ops)
