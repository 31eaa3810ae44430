"""Experts, delta nets, streams and chosen blocks on the GPU: each op, and whole models.

The ops' tests are those that run the same kernels on the CPU (tests/kernels/cuda). Models are
compared as those of the CPU backend are: with the reference's choices of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.workers.protocol import Row

from ..kernels.cuda.test_delta import (  # noqa: F401
    test_chunks_go_on_from_drafts_that_stand,
    test_cuts_between_chunks_change_no_bits,
    test_no_token_is_left_out,
)
from ..kernels.cuda.test_expert_groups import test_tiles_of_any_size  # noqa: F401
from ..kernels.cuda.test_expert_stream import test_shared_expert  # noqa: F401
from ..kernels.cuda.test_families import (  # noqa: F401
    test_choice,
    test_delta_net,
    test_drafts_change_no_bits,
    test_experts,
    test_experts_of_many_tokens,
    test_gates,
    test_ngram_rows,
    test_ngrams_join_the_streams,
    test_route,
    test_route_norms_what_it_reads,
    test_route_of_prompts,
    test_streams,
    test_two_blocks_of_a_head_change_no_bits,
)
from ..kernels.cuda.test_mixes import (  # noqa: F401
    test_prompts_go_another_way,
    test_streams_to_one,
)
from ..kernels.cuda.test_sparse import (  # noqa: F401
    check_choice,
    scores_like,
    test_of_equal_scores_the_first,
    test_scores_of_prompts,
    test_sparse_attention,
)
from ..kernels.cuda.test_states import test_every_byte_moves  # noqa: F401
from ..workers.test_golden_families import (
    LLAMA_CPP_KL,
    MINI,
    Choices,
    all_logits,
    mean_kl,
    prompts_of,
)
from ..workers.test_nvfp4 import nvfp4  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
Make = Callable[..., Any]
NOT_QUANTISED_KL = 5e-5


@pytest.fixture(scope="module")
def families(ptx: Path | None) -> Any:
    """CudaFamilyOps with what the imported tests need."""
    from voltapile.kernels.cuda.family_ops import CudaFamilyOps

    class Ops(CudaFamilyOps):
        alone: int | None = None

        def rows_alone(self, x: Any) -> int | None:
            return self.alone

        def array(self, values: np.ndarray) -> Any:
            found = self.zeros(values.shape, values.dtype)
            self.upload(found, values)
            return found

    return Ops(0, 1 << 30, ptx)


@pytest.fixture
def ops(families: Any) -> Iterator[Any]:
    families.reset_scratch()
    yield families
    families.prepare(lambda: None)


@pytest.fixture
def plain(ops: Any) -> Any:
    return ops


@pytest.fixture
def clustered(ops: Any) -> Any:
    if ops.arch < 90:
        pytest.skip("there are no clusters")
    return ops


class DeviceChoices(Choices):
    def force(self, ops: Any) -> None:
        own = ops.route

        def route(x: Any, router: Any, used: int, *rest: Any) -> Any:
            chosen = ops.to_host(own(x, router, used, *rest)[0])
            wanted, logits = self.taken[self.next]
            self.next += 1
            self.compare(chosen, wanted, logits)
            mine = np.take_along_axis(ops.to_host(ops.linear(x, router)), wanted, axis=1)
            shares = np.exp(mine - mine.max(axis=1, keepdims=True))
            routing = wanted, shares / shares.sum(axis=1, keepdims=True)
            forced = tuple(ops.scratch(each.shape, each.dtype) for each in routing)
            for target, values in zip(forced, routing, strict=True):
                ops.upload(target, values)
            return forced

        ops.route = route


@pytest.mark.parametrize("kind", ["plain", "few", "alike", "equal", "zeros", "tiny", "last"])
@pytest.mark.parametrize("counts", [[50560], [65536, 513, 512, 8200], [9000, 700] * 70], ids=len)
def test_choice_of_scores(ops: Any, kind: str, counts: list[int]) -> None:
    check_choice(ops, scores_like(kind, len(counts), max(counts)), counts, 512)


def check(path: Path, folder: Path, bound: float, engine_for: Make, cuda_engine: Make) -> None:
    truth = engine_for(path, router_input="f32")
    engine = cuda_engine(path, router_input="f32", cache_type_k="f16", cache_type_v="f16")
    choices = DeviceChoices()
    choices.take_down(truth.ops)
    choices.force(engine.ops)
    for ids in prompts_of(folder).values():
        assert mean_kl(all_logits(truth, ids), all_logits(engine, ids)) <= bound


@pytest.mark.parametrize(("model", "kind"), LLAMA_CPP_KL)
def test_kl(golden: Path, engine_for: Make, cuda_engine: Make, model: str, kind: str) -> None:
    path, bound = golden / model / f"model-{kind}.gguf", LLAMA_CPP_KL[model, kind] / 20
    check(path, golden / model, bound, engine_for, cuda_engine)


@pytest.mark.parametrize("model", MINI)
def test_kl_mini(mini: Path, engine_for: Make, cuda_engine: Make, model: str) -> None:
    folder = mini / model
    check(folder / "model-f16.gguf", folder, NOT_QUANTISED_KL, engine_for, cuda_engine)


def test_kl_of_nvfp4(
    nvfp4: Path,  # noqa: F811
    mini: Path,
    engine_for: Make,
    cuda_engine: Make,
) -> None:
    check(nvfp4, mini / "qwen3moe", NOT_QUANTISED_KL, engine_for, cuda_engine)


@pytest.mark.parametrize(
    ("model", "kind"),
    [("qwen3moe", "Q8_0"), ("qwen35", "Q8_0"), ("qwen3next", "Q8_0"), ("qwen4exp", "Q8_0")],
)
def test_greedy_tokens(golden: Path, cuda_engine: Make, drive: Make, model: str, kind: str) -> None:
    """Through recorded steps, after prompts in chunks: the stored answer."""
    folder = golden / model
    driver = drive(cuda_engine(folder / f"model-{kind}.gguf", router_input="f32"))
    answers = np.load(folder / "golden.npz")
    for chunk in (0, 64, 16):
        for name, ids in prompts_of(folder).items():
            margins = answers[f"deq_{kind}.{name}.greedy_margin"]
            end = int(np.append(np.flatnonzero(margins < 2e-2), len(margins))[0])
            found = driver.generate(ids, len(margins), chunk=chunk)
            assert found[:end] == answers[f"deq_{kind}.{name}.greedy"][:end].tolist()


@pytest.mark.parametrize("model", MINI)
def test_bits_do_not_depend_on_company(
    mini: Path, cuda_engine: Make, drive: Make, model: str
) -> None:
    path, prompts = mini / model / "model-f16.gguf", list(prompts_of(mini / model).values())
    ids = [(prompts[i % len(prompts)] * 2)[i : i + 9 + i] for i in range(4)]
    driver = drive(cuda_engine(path))
    alone = [driver.generate(each, 12, slot=i) for i, each in enumerate(ids)]
    for slot, each in enumerate(ids):
        driver.step(driver.start(slot, each, 12))
    together: list[list[int]] = [[tokens[0]] for tokens in alone]
    for _ in range(11):
        for answer in driver.step([Row(slot=slot) for slot in range(4)]):
            together[answer.slot] += answer.tokens
    assert together == alone
