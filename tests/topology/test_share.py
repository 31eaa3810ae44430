import msgspec
import pytest
from voltapile.topology.share import divide, layer_shares, tensor_shares, whole
from voltapile.topology.spec import CacheNeed, DeltaNet, Experts, Rope, Spec


def spec(heads: int, kv_heads: int, ffn: int = 1536, layers: int = 5, vocab: int = 1000) -> Spec:
    need = CacheNeed(
        kind="full", layers=tuple(range(layers)), kv_heads=kv_heads, key_dim=64, value_dim=64
    )
    return Spec(
        architecture="llama",
        name="made",
        context=1024,
        layers=layers,
        width=64 * heads,
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=64,
        value_dim=64,
        ffn=ffn,
        eps=1e-5,
        rope=Rope(layout="norm", dims=64, base=1e4),
        attention_scale=0.125,
        tied=True,
        caches=(need,),
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (24, 4), (14, 2), (32, 8), (4, 4), (3, 1)])
def test_every_part_has_one_owner(ranks: int, heads: int, kv_heads: int) -> None:
    shares = tensor_shares(spec(heads, kv_heads), [1.0] * ranks, 256)
    for name, total in (("heads", heads), ("ffn", 1536), ("vocab", 1000)):
        owned = [i for share in shares for i in range(*getattr(share, name))]
        assert owned == list(range(total))
    sizes = [share.heads[1] - share.heads[0] for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (24, 4), (14, 2), (32, 8)])
def test_a_query_head_finds_its_kv_head(ranks: int, heads: int, kv_heads: int) -> None:
    for share in tensor_shares(spec(heads, kv_heads), [1.0] * ranks, 256):
        for local, head in enumerate(range(*share.heads)):
            assert share.kv_heads[0] + share.head_map[local] == head * kv_heads // heads
        if share.heads[0] == share.heads[1]:
            assert share.kv_heads == (0, 0)
        else:  # none is kept for nothing
            assert sorted(set(share.head_map)) == list(range(share.kv_heads[1] - share.kv_heads[0]))


def test_blocks_stay_together() -> None:
    for share in tensor_shares(spec(9, 3), [1.0] * 4, 256):
        assert share.ffn[0] % 256 == 0 == share.ffn[1] % 256


def test_proportions() -> None:
    assert divide(100, [3, 1]) == [(0, 75), (75, 100)]
    assert divide(10, [1, 0, 1]) == [(0, 5), (5, 5), (5, 10)]
    assert divide(100, [1, 1], 64) == [(0, 64), (64, 100)]


def test_layers_in_stages() -> None:
    shares = layer_shares(spec(9, 3), [1, 1])
    assert [share.layers for share in shares] == [[0, 1], [2, 3, 4]]
    assert [(share.embeds, share.answers) for share in shares] == [(True, False), (False, True)]
    assert all(share.heads == (0, 9) and share.vocab == (0, 1000) for share in shares)


def test_a_rank_that_is_alone_owns_everything() -> None:
    share = whole(spec(9, 3))
    assert (share.heads, share.kv_heads, share.ffn) == ((0, 9), (0, 3), (0, 1536))
    assert share.head_map == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert share.layers == [0, 1, 2, 3, 4]


def test_ranks_know_whom_they_meet() -> None:
    alone = whole(spec(4, 2))
    assert not alone.is_part
    assert (alone.previous, alone.following) == (-1, -1)
    for share in tensor_shares(spec(4, 2), [1.0] * 3, 32):
        assert share.is_part
        assert share.vocab_parts == [320, 384, 296]
        assert (share.previous, share.following) == (-1, -1)
    stages = layer_shares(spec(4, 2), [1.0] * 3)
    assert not any(share.is_part for share in stages)
    assert [(share.previous, share.following) for share in stages] == [(-1, 1), (0, 2), (1, -1)]


def mixed() -> Spec:
    """10 experts of 320 columns, a shared one, and delta nets with 3 value heads a key head."""
    return msgspec.structs.replace(
        spec(6, 2),
        ffn=0,
        experts=Experts(count=10, used=3, ffn=320, shared_ffn=640),
        delta=DeltaNet(
            layers=(0, 1), key_heads=4, value_heads=12, head_dim=32, conv_kernel=4, is_tiled=True
        ),
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_experts_and_delta_heads_have_one_owner(ranks: int) -> None:
    shares = tensor_shares(mixed(), [1.0] * ranks, 32, 0, 32)
    assert [i for share in shares for i in range(*share.experts)] == list(range(10))
    assert {share.expert_ffn for share in shares} == {(0, 320)}
    assert [i for share in shares for i in range(*share.shared_ffn)] == list(range(640))
    assert sorted(head for share in shares for head in share.value_heads) == list(range(12))
    for share in shares:
        assert share.key_heads == sorted({head % 4 for head in share.value_heads})
    kept = sum(len(share.key_heads) for share in shares)
    assert kept <= 4 + ranks - 1  # neighbours share one at most


def test_experts_may_be_cut() -> None:
    shares = tensor_shares(mixed(), [1.0] * 3, 32, 32, 32)
    assert [share.expert_ffn for share in shares] == [(0, 96), (96, 224), (224, 320)]
    assert {share.experts for share in shares} == {(0, 10)}


def test_a_stage_has_everything_of_its_layers() -> None:
    first, second = layer_shares(mixed(), [1.0, 1.0])
    assert first.experts == second.experts == (0, 10)
    assert first.value_heads == list(range(12))
    assert (first.embeds, first.answers, second.previous) == (True, False, 0)
