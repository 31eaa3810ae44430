"""Small readers of what the kernel tells of its nodes."""

from __future__ import annotations

from pathlib import Path

from voltapile.topology.nodes import memory_nodes, nearest


def test_nearest(tmp_path: Path) -> None:
    for node, distances in ((0, "10 40 80"), (8, "40 10 80"), (255, "80 60 10")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "distance").write_text(distances)
    assert nearest(tmp_path, 8, [0, 8]) == 8
    assert nearest(tmp_path, 255, [0, 8]) == 8
    assert nearest(tmp_path, 255, [0]) == 0
    assert nearest(tmp_path, -1, [0, 8]) == -1
    assert nearest(tmp_path, 7, [0, 8]) == -1  # nothing is told of it
    assert memory_nodes(tmp_path) == []
