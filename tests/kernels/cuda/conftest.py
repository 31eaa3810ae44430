"""Hands tests the module beside this file that stands for cupy."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

# Ten to sixty seconds of emulation each, or the other half of a pair; .ci/run has them beside the
# quick ones. Starts of names, behind the file's.
LONG = (
    "test_group.py::test_a_sum_with_its_norm_has_the_bits_of_both[2-5120]",
    "test_group.py::test_a_prompts_sum_of_two_ranks[3-5128",
    "test_families.py::test_route[80-512-64-F16]",
    "test_families.py::test_ngrams_join_the_streams[F16]",
    "test_families.py::test_shared_expert[80-Q4_K",
    "test_families.py::test_delta_net[1-2-128-sigmoid]",
    "test_families.py::test_experts[80-Q4_K",
    "test_families.py::test_experts[80-IQ4_NL",
    "test_sparse.py::test_sparse_attention[80-",
    "test_rows.py::test_rms_norm[4096]",
    "test_fragments.py::test_a_row_has_the_same_bits_in_any_company[80]",
    "test_fragments.py::test_outliers[1e+30-rows]",
    "test_fragments.py::test_a_block_takes_several_tiles[70]",
    "test_clusters.py::test_sums_wait_for_their_readers[1]",
    "test_clusters.py::test_glu_bias_and_residual",
    "test_wires.py::test_a_pair_whose_pattern_is_lost_goes_by_the_host",
    "test_wires.py::test_a_pair_that_cannot_be_opened_goes_by_the_host",
    "test_stream.py::test_bits_are_those_of_rows[Q8_0]",
    "test_mixes.py::test_prompts_go_another_way",
    "test_mixes.py::test_streams_to_one[Q8_0-320",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.nodeid.split("/")[-1].startswith(
            LONG
        ):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def fake_cupy() -> ModuleType:
    path = Path(__file__).with_name("fake_cupy.py")
    spec = importlib.util.spec_from_file_location("cuda_tests_fake_cupy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
