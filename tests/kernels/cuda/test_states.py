"""A slot's states travel in one launch, in order with the steps, and the host waits for nothing.

On a GPU that is not there, which notes what is submitted to which stream.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from voltapile.kernels.backend import describe
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.families import DeltaShape
from voltapile.shm.gguf import Gguf
from voltapile.topology import machine
from voltapile.topology.architectures import spec_of
from voltapile.topology.gpu import Gpu
from voltapile.topology.plan import Backend, Options
from voltapile.topology.planner import plan
from voltapile.workers.engine import Engine, open_engine
from voltapile.workers.protocol import Copy, Row, Step

from .emulated_families import EmulatedFamilies
from .emulation import has_compiler


@pytest.fixture
def gpu(fake_cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = fake_cupy.Gpu()
    fake_cupy.install(monkeypatch, made)
    loader = importlib.import_module("voltapile.kernels.cuda.loader")
    monkeypatch.setattr(loader, "compile_all", lambda instances, *_: [b""] * len(instances))
    monkeypatch.setattr(loader, "compile_instance", lambda *_: b"")
    return made


@pytest.fixture(params=["qwen35", "qwen4exp"])
def engine(request: pytest.FixtureRequest, gpu: Any, mini: Path) -> Iterator[Engine]:
    card = Gpu(index=0, name="A card", arch=70, memory_bytes=64 << 30, free_bytes=60 << 30)
    computer = msgspec.structs.replace(machine.probe(), gpus=[card])
    chosen = Options(context=512, slots=3, checkpoints=2)
    with Gguf.open(mini / request.param / "model-f16.gguf") as gguf:
        made = plan(spec_of(gguf), gguf, computer, Backend(**describe("cuda")), chosen)
    with open_engine(made) as engine:
        gpu.log.clear()
        yield engine


def waits(gpu: Any) -> int:
    return sum(entry[0] == "host waits" for entry in gpu.log)


def submit(engine: Engine, gpu: Any, *copies: Copy) -> list[str]:
    """A prompt's rows after `copies`: what is launched, in order. All of it goes to one stream."""
    gpu.log.clear()
    pages = [[1] for _ in engine.plan.caches]
    row = Row(slot=0, tokens=np.zeros(40, np.int32), pages=pages)
    engine.submit(Step(id=0, copy=list(copies), rows=[row]))
    assert len({entry[1] for entry in gpu.log if entry[0] in ("copy", "launch")}) == 1
    return [entry[2] for entry in gpu.log if entry[0] == "launch"]


SAVE, RESTORE = (
    Copy(kind="checkpoint", source=0, target=1),
    Copy(kind="restore", source=1, target=2),
)


@pytest.mark.parametrize("copies", [[], [SAVE], [RESTORE], [SAVE, RESTORE]])
def test_a_copy_is_one_launch_before_its_step(engine: Engine, gpu: Any, copies: list[Copy]) -> None:
    """So it comes after the step that made the state and before the one that changes it; nothing
    is copied but what every step sends and fetches, and the host waits for nothing."""
    submit(engine, gpu)  # with counters of experts, which come now and then
    alone = len(submit(engine, gpu)), copied(gpu), waits(gpu)
    launched = submit(engine, gpu, *copies)
    assert (len(launched) - len(copies), copied(gpu), waits(gpu)) == alone
    assert alone[2] == 0
    assert launched[: len(copies)] == ["move_states"] * len(copies)
    assert launched[len(copies)] == "begin_step"


def copied(gpu: Any) -> list[tuple[int, int]]:
    return [entry[2:] for entry in gpu.log if entry[0] == "copy"]


def test_what_was_saved_is_read_when_it_is_there(engine: Engine, gpu: Any) -> None:
    submit(engine, gpu, SAVE)
    engine.checkpoints.finite(0)
    last = [entry[0] for entry in gpu.log if entry[0] in ("launch", "host waits")][-2:]
    assert last == ["launch", "host waits"]


def test_memory_is_taken_when_a_model_is_loaded(engine: Engine, gpu: Any) -> None:
    memory, states = engine.checkpoints.memory, [state for _, state in engine.model.states()]
    assert memory.shape[0] == 1 + engine.plan.checkpoints
    submit(engine, gpu)  # which may load a kernel of its own
    requests = len(gpu.requests)
    ends = {address + len(buffer) for address, buffer in gpu.host.items()}
    assert any(0 <= end - memory.ctypes.data - memory.nbytes <= 1 for end in ends), "not pinned"
    submit(engine, gpu, SAVE, RESTORE)
    assert gpu.requests[requests:] == []
    planned = engine.plan.ranks[0]
    assert sum(map(engine.ops.state_bytes, states)) == memory.shape[1]
    assert 0.9 * planned.host["checkpoints"] < memory.nbytes <= planned.host["checkpoints"]
    assert planned.memory["state"] >= 4 * memory.shape[1], "three slots and padding"


@pytest.fixture
def plain(tmp_path: Path) -> Any:
    return EmulatedFamilies(80, tmp_path, max_shared(80))


@pytest.mark.skipif(not has_compiler(), reason="there is no g++")
@pytest.mark.parametrize("heads", [1, 3])
def test_every_byte_moves(plain: Any, heads: int) -> None:
    """Of one slot, there and back, and of no other. An array of 4 bytes a slot is among them."""
    ops = plain
    shape = DeltaShape(1, heads, 32, 3, (0,) * heads, "silu", 1e-6)
    states = [ops.delta_state(4, shape), ops.ngram_state(4, 7, 3), ops.delta_state(4, shape)]
    rng = np.random.default_rng(0)
    arrays = [x for state in states for x in (*state.values, *state.log, state.logged)]
    before = [rng.integers(-999, 999, array.shape).astype(array.dtype) for array in arrays]
    for array, values in zip(arrays, before, strict=True):
        ops.upload(array, values)
    memory = ops.checkpoint_memory(states, 2)
    memory[0] = 7
    ops.save_states(states, 2, memory[1])
    for array in arrays:
        ops.upload(array[2:3], np.zeros(array[2:3].shape, array.dtype))
    ops.restore_states(states, 2, memory[1])
    for array, values in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(ops.to_host(array), values)
    ops.restore_states(states, 0, memory[1])
    for array, values in zip(arrays, before, strict=True):
        found = ops.to_host(array)
        np.testing.assert_array_equal(found[0], values[2])
        np.testing.assert_array_equal(found[1:], values[1:])
    assert (memory[0] == 7).all()
