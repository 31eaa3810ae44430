"""voltapile probe: a file that --machine takes, and a summary that names everything."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from voltapile.gateway.cli.main import main
from voltapile.gateway.cli.probe import summary
from voltapile.topology.gpu import Gpu, Link
from voltapile.topology.machine import load, probe
from voltapile.topology.nodes import MemoryNode


def test_what_is_written_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json"
    assert main(["probe", "-o", str(path), "-m", __file__]) == 0
    assert load(path).nodes[0].cpus == probe().nodes[0].cpus
    assert "node 0:" in capsys.readouterr().out
    assert main(["probe"]) == 0
    path.write_text(capsys.readouterr().out)
    assert load(path).name == probe().name


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "-m", "/nowhere/x"]) == 1
    assert "No such file" in capsys.readouterr().err


def test_summary() -> None:
    size = {"memory_bytes": 16 << 30, "free_bytes": 15 << 30}
    gpus = [
        Gpu(index=0, name="A", arch=70, node=8, host_links=2, host_bandwidth=45e9, **size),
        Gpu(index=1, name="B", arch=70, pcie=[3, 16], **size),
    ]
    links = [Link(a=0, b=1, kind="host", bandwidth=6e9, peer=False)]
    other = MemoryNode(id=255, is_gpu=True, **size)
    found = msgspec.structs.replace(
        probe(), gpus=gpus, links=links, memory_nodes=[other], disk="sda", disk_bandwidth=2e8
    )
    text = "\n".join(summary(found))
    for part in (
        "node 255: 16.0 GiB, a GPU's memory: never chosen",
        "GPU 0: A, 15.0 GiB of 16.0 GiB free, node 8, 2 NVLinks to its CPU, about 45 GB/s",
        "GPU 1: B, 15.0 GiB of 16.0 GiB free, no node told, PCIe 3 x16",
        "GPUs 0 and 1: host, no peers, about 6 GB/s",
        "drive: sda, 0.2 GB/s",
    ):
        assert part in text
