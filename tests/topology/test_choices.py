"""Options that change a model are named in the Plan, and every rank makes the same Spec of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from voltapile.shm.gguf import Gguf
from voltapile.topology.architectures import spec_of
from voltapile.topology.choices import as_chosen, chosen
from voltapile.topology.plan import Options, PlanError
from voltapile.topology.spec import Rope, SpecError, inv_freq


def spec_at(path: Path) -> Any:
    with Gguf.open(path) as gguf:
        return spec_of(gguf)


def test_nothing_is_named_that_is_as_the_file_says() -> None:
    assert chosen(Options()) == {}
    assert chosen(Options(rope_scaling="yarn", rope_scale=4, rope_original=32768)) == {
        "rope_scaling": "yarn",
        "rope_scale": "4",
        "rope_original": "32768",
    }


def test_yarn_reaches_farther(mini: Path) -> None:
    spec = spec_at(mini / "qwen3/model-f16.gguf")
    found = as_chosen(spec, {"rope_scaling": "yarn", "rope_scale": "4", "rope_original": "1024"})
    assert found.context == 4096
    assert (found.rope.scaling, found.rope.factor, found.rope.original_context) == ("yarn", 4, 1024)
    frequencies, scale = inv_freq(found.rope)
    plain, _ = inv_freq(spec.rope)
    assert scale == pytest.approx(1 + 0.1 * np.log(4))
    assert frequencies[0] == plain[0]  # turns often enough
    assert frequencies[-1] == pytest.approx(plain[-1] / 4)  # does not turn once in 1,024 tokens
    linear = as_chosen(spec, {"rope_scale": "2"})
    assert (linear.rope.scaling, linear.context) == ("linear", 2 * spec.context)
    assert as_chosen(linear, {"rope_scaling": "none"}).rope.factor == 1.0


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"rope_scaling": "yarn"}, "--rope-scaling yarn needs --rope-scale"),
        ({"rope_scaling": "magic", "rope_scale": "2"}, "--rope-scaling magic: expected one of"),
        ({"rope_scale": "0.5"}, "--rope-scale 0.5, .*: expected 1 or more"),
        ({"rope_scale": "nan"}, "--rope-scale nan, .*: expected 1 or more"),
        ({"compress_ratio": "4"}, "--compress-ratio 4: the file has no layer with an indexer"),
    ],
)
def test_refused(mini: Path, choices: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        as_chosen(spec_at(mini / "qwen3/model-f16.gguf"), choices)


def test_planned_and_refused_as_other_options_are(mini: Path, plan_for: Callable[..., Any]) -> None:
    path = mini / "qwen35/model-f16.gguf"
    plan = plan_for(path, rope_scaling="yarn", rope_scale=8.0, rope_original=64, context=0)
    assert plan.choices["rope_scaling"] == "yarn"
    assert plan.context == 512
    with pytest.raises(PlanError, match="needs --rope-scale"):
        plan_for(path, rope_scaling="yarn")


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("model", ["qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp"])
def test_a_long_context_is_planned(
    mini: Path, plan_for: Callable[..., Any], model: str, kind: str
) -> None:
    """262,144 tokens of each family; scratch does not grow with them."""
    types = {"cache_type_k": kind, "cache_type_v": kind}
    few, many = (
        plan_for(mini / model / "model-f16.gguf", "cpu", slots=1, context=context, **types)
        for context in (32768, 262144)
    )
    assert many.context == 262144
    assert many.ranks[0].memory["scratch"] == few.ranks[0].memory["scratch"]


def test_yarn_from_metadata_and_by_option_are_one(mini: Path) -> None:
    spec = spec_at(mini / "qwen3/model-f16.gguf")
    yarn = Rope(
        layout="neox", dims=spec.rope.dims, base=spec.rope.base, scaling="yarn", factor=4.0,
        original_context=spec.context,
    )  # fmt: skip
    by_file = msgspec.structs.replace(spec, rope=yarn)
    by_option = as_chosen(spec, {"rope_scaling": "yarn", "rope_scale": "4"})
    assert by_option.rope == by_file.rope
