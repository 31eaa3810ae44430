"""CUDA_VISIBLE_DEVICES: the GPUs that CUDA would see, in its order, with its numbers."""

from __future__ import annotations

import logging

import pytest
from fake_nvml import Fake, FakeNvml, ac922
from voltapile.topology.gpu import probe_gpus
from voltapile.topology.machine import probe
from voltapile.topology.nvml import Nvml
from voltapile.topology.visible import visible

UUIDS = ("GPU-8932f937-d72c", "GPU-8932aaaa-0000", "GPU-17", "GPU-2b")


def places(text: str | None) -> list[int]:
    """Of GPUs as the driver counts, in CUDA's order."""
    cards = [Fake(bus=f"0000:0{place}:00.0", uuid=uuid) for place, uuid in enumerate(UUIDS)]
    found = visible(Nvml(FakeNvml(cards)).cards(), text)
    if text is not None:
        assert [card.index for card in found] == list(range(len(found)))
    return [int(card.bus[6]) for card in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,3", [2, 3]),
        ("3, 1", [3, 1]),
        ("0,2,-1,1", [0, 2]),
        ("1,9,0", [1]),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,1,0", []),
        ("1gpu,0", [1, 0]),
        ("+02,00,0x1", []),  # 0 is there twice
        ("+02,00,x1", [2, 0]),
        ("1,\u0663", [1]),  # a digit, but not to C
        ("1," + "9" * 5000, [1]),  # more than int() reads
        ("GPU-17,GPU-8932f", [2, 0]),
        ("GPU-17,GPU-8932", [2]),
        ("GPU-17,0", [2]),
        ("0,GPU-17", [0]),
        ("MIG-GPU-17/1/0", []),
    ],
)
def test_as_cuda_reads_it(text: str | None, expected: list[int]) -> None:
    assert places(text) == expected


@pytest.mark.parametrize(("text", "is_told"), [("0,7", True), ("0,0", True), ("0,-1", False)])
def test_a_slip_is_told(caplog: pytest.LogCaptureFixture, text: str, is_told: bool) -> None:
    """Or a server would quietly compute on the CPU."""
    with caplog.at_level(logging.WARNING):
        places(text)
    assert bool(caplog.messages) == is_told
    assert all(f"CUDA_VISIBLE_DEVICES={text}" in each for each in caplog.messages)


def test_gpus_and_links_are_counted_as_cuda_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One card of one island, two of another; the links between those that are seen alone."""
    monkeypatch.setattr("ctypes.CDLL", lambda path: ac922())
    gpus, links = probe_gpus(seen="5,0,4")
    buses = ["0005:06:00.0", "0004:04:00.0", "0005:05:00.0"]
    assert [(gpu.index, gpu.bus) for gpu in gpus] == list(enumerate(buses))
    assert {(link.a, link.b): link.kind for link in links} == {
        (0, 1): "host", (0, 2): "nvlink", (1, 2): "host",
    }  # fmt: skip
    assert [gpu.bus for gpu in probe(seen="1").gpus] == ["0004:05:00.0"]
