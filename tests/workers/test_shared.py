"""Tensors that all ranks read in one memory: filled once, by everybody a part."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from voltapile.shm.gguf import Gguf
from voltapile.shm.segment import FOLDER, SegmentError
from voltapile.workers import shared as module
from voltapile.workers.shared import shared_tensors
from voltapile.workers.weights import FileWeights

NAMES = ["token_embd.weight", "output.weight"]
TABLE = "per_layer_token_embd.weight"


class Threads:
    """A Group of threads."""

    def __init__(self, rank: int, ranks: int, name: str, told: list[bytes], barrier: Any) -> None:
        self.rank, self.ranks, self.name = rank, ranks, name
        self._told, self._barrier = told, barrier

    def exchange(self, data: bytes) -> list[bytes]:
        self._told[self.rank] = data
        self._barrier.wait(20)
        found = list(self._told)
        self._barrier.wait(20)
        return found


def groups(ranks: int, name: str) -> list[Any]:
    told, barrier = [b""] * ranks, threading.Barrier(ranks)
    return [Threads(rank, ranks, name, told, barrier) for rank in range(ranks)]


def plan(ranks: int, names: list[str]) -> Any:
    return SimpleNamespace(
        id=f"test-{secrets.token_hex(6)}",
        shared=dict.fromkeys(names, 1),
        ranks=[SimpleNamespace(node=0) for _ in range(ranks)],
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_everybody_reads_what_all_have_written(
    mini: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(module, "PIECE", 5000)
    chosen = plan(ranks, NAMES)
    members = groups(ranks, chosen.id) if ranks > 1 else [None]
    told: list[float] = []

    def run(rank: int) -> None:
        with Gguf.open(mini / "qwen3/model-f16.gguf") as gguf:
            opened = shared_tensors(chosen, gguf, rank, members[rank], told.append)
            with opened as found:
                for name in NAMES:
                    assert found[name].tobytes() == gguf.data(name).tobytes()
                    assert found[name].ctypes.data % module.PAGE == 0
                assert not list(FOLDER.glob(f"*{chosen.id}*"))  # a crash would leave nothing
                if members[rank]:
                    members[rank].exchange(b"")

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(run, range(ranks)))
    assert told.count(1.0) == ranks * len(NAMES)


def test_a_plan_that_shares_nothing_takes_nothing(mini: Path) -> None:
    with (
        Gguf.open(mini / "qwen3/model-f16.gguf") as gguf,
        shared_tensors(plan(1, []), gguf, 0, None, print) as found,
    ):
        assert found == {}


@pytest.mark.parametrize(
    ("model", "names", "told"),
    [
        ("qwen3", NAMES, "or keep the embedding in VRAM: -ot embed=vram"),
        ("qwen4exp", [TABLE], "or leave the n-gram table in the file: --ngram-table mapped"),
    ],
)
def test_a_small_dev_shm_ends_all_ranks_alike(
    mini: Path, monkeypatch: pytest.MonkeyPatch, model: str, names: list[str], told: str
) -> None:
    def create(*args: Any, **options: Any) -> None:
        raise SegmentError("64 MiB of /dev/shm")

    monkeypatch.setattr("voltapile.kernels.group.Segment.create", create)
    chosen = plan(2, names)
    members = groups(2, chosen.id)

    def run(rank: int) -> str:
        with (
            Gguf.open(mini / model / "model-f16.gguf") as gguf,
            pytest.raises(SegmentError) as caught,
            shared_tensors(chosen, gguf, rank, members[rank], lambda fraction: None),
        ):
            pass
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert found == [f"64 MiB of /dev/shm; {told}"] * 2


def test_weights_are_read_where_they_are_shared(mini: Path, plan_for: Callable[..., Any]) -> None:
    from voltapile.topology.architectures import spec_of

    taken: list[Any] = []
    ops = SimpleNamespace(
        name="some",
        shared_weight=lambda *call: taken.append(call) or SimpleNamespace(nbytes=call[0].nbytes),
    )
    path = mini / "qwen3/model-f16.gguf"
    with Gguf.open(path) as gguf:
        share = plan_for(path).ranks[0].share
        memory = np.array(gguf.data(NAMES[0])).reshape(-1).view(np.uint8)
        weights = FileWeights(gguf, ops, spec_of(gguf), share, shared={NAMES[0]: memory})  # type: ignore[arg-type]
        weights(NAMES[0])
        assert taken == [(memory, "F16", gguf.tensors[NAMES[0]].shape)]
        del ops.shared_weight
        with pytest.raises(ValueError, match="the some backend reads no weights in shared memory"):
            weights(NAMES[0])


def test_a_table_that_stays_in_the_file_is_told_where_it_lies(
    mini: Path, plan_for: Callable[..., Any]
) -> None:
    from voltapile.topology.architectures import spec_of

    taken: list[Any] = []
    ops = SimpleNamespace(name="some", file_weight=lambda *call: taken.append(call) or call)
    path = mini / "qwen4exp/model-f16.gguf"
    with Gguf.open(path) as gguf:
        share, told = plan_for(path).ranks[0].share, []
        weights = FileWeights(gguf, ops, spec_of(gguf), share, told.append, staged=[TABLE])  # type: ignore[arg-type]
        weights(TABLE)
        ((file, offset, kind, shape),) = taken
        found = np.fromfile(file, np.uint8, gguf.tensors[TABLE].nbytes, offset=offset)
        assert found.tobytes() == gguf.data(TABLE).tobytes()
        assert (kind, shape) == ("F16", gguf.tensors[TABLE].shape)
        assert told == [], "nothing is read yet"
        del ops.file_weight
        with pytest.raises(ValueError, match="the some backend reads no rows of a file"):
            weights(TABLE)
