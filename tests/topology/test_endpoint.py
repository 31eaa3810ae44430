"""Where gateway and workers meet: short, private, and nobody else's."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from voltapile.topology import endpoint as module
from voltapile.topology.endpoint import EndpointError, default_endpoint, prepare, private_endpoint


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "runtime_directory", lambda: tmp_path / "v")
    return tmp_path / "v"


def test_addresses() -> None:
    assert default_endpoint("abc") == default_endpoint("abc") != default_endpoint("abd")
    assert private_endpoint() != private_endpoint()
    assert len(private_endpoint().removeprefix("ipc://")) <= 107


def test_prepare_makes_a_private_folder(folder: Path) -> None:
    prepare(f"ipc://{folder}/x.sock")
    prepare(f"ipc://{folder}/y.sock")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_prepare_refuses_what_others_could_enter(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o755)
    with pytest.raises(EndpointError, match="chmod 700"):
        prepare(f"ipc://{folder}/x.sock")
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(EndpointError, match=f"it is user {user}'s"):
        prepare(f"ipc://{folder}/x.sock")
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(EndpointError, match="expected a directory: remove it"):
        prepare(f"ipc://{folder}/x.sock")


def test_prepare_leaves_other_addresses_alone(folder: Path) -> None:
    prepare("tcp://127.0.0.1:5555")
    prepare("ipc:///nowhere/at/all.sock")
    assert not folder.exists()
    with pytest.raises(EndpointError, match="at most 107 bytes"):
        prepare("ipc:///tmp/" + "x" * 120)
