"""How matrix kernels cut rows of each format: the sizes in csrc/unpack*.cuh and matmul_chunk.cuh.

A chunk is what one warp takes of 16 rows at once. Tests compare these numbers with the sources'.
"""

from __future__ import annotations

from dataclasses import dataclass

from voltapile.shm.formats import format_of

MUCH = 3072  # bytes in flight that need no third stage
FINISHED = 1024  # bytes of a warp's finished sums, where nothing else makes room for them
# KiB of shared memory that a block may take, by compute capability; 99 elsewhere.
SHARED = {70: 96, 72: 96, 75: 64, 80: 163, 87: 163, 90: 227, 100: 227, 103: 227}


@dataclass(frozen=True)
class Chunk:
    """groups: of 32 columns. align: divides the address of every block. scales: runs of a group
    with a scale of their own, 0: none. x_planes: halves of an activation. span: groups that
    share bytes, so that a thread unpacks them together. is_direct: before sm_80 blocks go from
    global memory to registers, and shared memory holds tokens and finished sums alone. is_block:
    bytes are multiplied as they lie, so that no scales are put down."""

    name: str
    groups: int = 8
    align: int = 2
    scales: int = 1
    has_offset: bool = False
    x_planes: int = 1
    is_expanded: bool = False
    warps: int = 8
    span: int = 1
    is_direct: bool = False
    is_block: bool = False

    @property
    def bytes(self) -> int:
        kind = format_of(self.name)
        return 32 * self.groups // kind.block_len * kind.block_bytes

    @property
    def stage_bytes(self) -> int:
        slack = 0 if self.align >= 16 else 16 - self.align
        return 16 * 16 * ((self.bytes + slack + 15) // 16 | 1)

    def stages(self, arch: int) -> int:
        """Chunks of a warp in shared memory: asynchronous copies of sm_80 fill them ahead."""
        if arch < 80:
            return 1
        return 2 if self.stage_bytes > MUCH else 3

    def warp_bytes(self, room: int, arch: int) -> int:
        """Shared memory of a warp that holds `room` tokens."""
        fixed = self.stages(arch) * self.stage_bytes + 16 * 1040 * self.is_expanded
        fixed += self.scale_bytes
        fixed = FINISHED if self.is_direct and arch < 80 else fixed
        return -(-(fixed + room * self.token_bytes) // 128) * 128

    @property
    def scale_bytes(self) -> int:
        """What a warp keeps of a chunk's scales."""
        return 0 if self.is_block else 128 * self.groups * self.scales

    @property
    def token_bytes(self) -> int:
        """Of a token's part of a chunk: halves, sums, a scale."""
        if self.is_block:
            return 576
        sums = 4 * self.groups * self.scales * self.has_offset
        return 64 * self.x_planes * self.groups + sums + 4

    def slot_bytes(self, room: int) -> int:
        """Of a chunk's tokens, where those of several are kept; for direct formats."""
        return -(-self.token_bytes * room // 16) * 16


def _expanded(name: str) -> Chunk:
    return Chunk(name, scales=0, is_expanded=True, warps=2)


_ALL = (
    Chunk("F32", groups=2, align=4, scales=0, x_planes=2),
    Chunk("F16", groups=4, scales=0, x_planes=2),
    Chunk("BF16", groups=4, scales=0, x_planes=2),
    Chunk("Q4_0"),
    Chunk("Q4_1", align=4, has_offset=True),
    Chunk("Q5_0"),
    Chunk("Q5_1", align=8, has_offset=True),
    Chunk("Q8_0", is_block=True),
    Chunk("Q2_K", span=4, align=4, scales=2, has_offset=True),
    Chunk("Q3_K", span=4, scales=2),
    Chunk("Q4_K", span=2, align=16, has_offset=True, is_direct=True, is_block=True),
    Chunk("Q5_K", span=2, align=16, has_offset=True),
    Chunk("Q6_K", span=4, scales=2, is_block=True),
    Chunk("IQ4_NL"),
    Chunk("IQ4_XS", align=8),
    Chunk("MXFP4", align=1),
    Chunk("NVFP4_SCALED", align=8, scales=2),
    *map(
        _expanded,
        ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"),
    ),
)
CHUNKS = {chunk.name: chunk for chunk in _ALL}
REPACKED = {"NVFP4": "NVFP4_SCALED"}  # what becomes of a file's format at load


def max_shared(arch: int) -> int:
    """Bytes of shared memory that a block may take."""
    return SHARED.get(arch, 99) << 10
