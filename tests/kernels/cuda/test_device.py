"""Whatever asks a GPU for memory and gets none says so, beside the Plan.

All of it on a GPU that is not there. The same loads are held against the Plan.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from voltapile.gateway.cli import main
from voltapile.kernels.backend import describe
from voltapile.shm.gguf import Gguf
from voltapile.topology import machine, roofline
from voltapile.topology.architectures import spec_of
from voltapile.topology.gpu import Gpu
from voltapile.topology.plan import Backend, Options, Plan, unbuilt
from voltapile.topology.planner import plan
from voltapile.workers.engine import Engine, open_engine
from voltapile.workers.protocol import Row, Step

MODELS = ["llama", "qwen3", "gemma3"]
FAMILIES = ["qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp"]


@pytest.fixture
def gpu(fake_cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU that is not there, whose kernels need no compiler."""
    made = fake_cupy.Gpu()
    fake_cupy.install(monkeypatch, made)
    loader = importlib.import_module("voltapile.kernels.cuda.loader")
    monkeypatch.setattr(loader, "compile_all", lambda instances, *_: [b""] * len(instances))
    monkeypatch.setattr(loader, "compile_instance", lambda *_: b"")
    return made


@pytest.fixture
def computer() -> machine.Machine:
    card = Gpu(index=0, name="A card", arch=70, memory_bytes=64 << 30, free_bytes=60 << 30)
    return msgspec.structs.replace(machine.probe(), gpus=[card])


@pytest.fixture
def planned(mini: Path, computer: machine.Machine) -> Callable[..., Plan]:
    def make(model: str = "llama", **options: Any) -> Plan:
        chosen = Options(**{"context": 512, "slots": 3, **options})
        with Gguf.open(mini / model / "model-f16.gguf") as gguf:
            return plan(spec_of(gguf), gguf, computer, Backend(**describe("cuda")), chosen)

    return make


def load(plan: Plan) -> None:
    with open_engine(plan):
        pass


@pytest.mark.parametrize("model", [*MODELS, *FAMILIES])
def test_no_more_is_taken_than_planned(gpu: Any, planned: Callable[..., Plan], model: str) -> None:
    chosen = planned(model)
    memory = chosen.ranks[0].memory
    with open_engine(chosen) as engine:
        taken = engine.ops.device.taken
        assert 0 < taken["weights"] <= memory["weights"]
        assert memory["scratch"] <= taken["scratch"] < memory["scratch"] + 256
        lasting = memory["kv"] + memory["slots"] + memory.get("state", 0)
        assert 0 < taken["caches and slots"] <= lasting + (64 << 20)
        assert sum(taken.values()) <= sum(memory.values())
        requests = len(gpu.requests)
        steps(engine)
        assert len(gpu.requests) == requests, "a step took memory"
        assert gpu.replays == 4


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_an_embedding_in_host_memory(gpu: Any, planned: Callable[..., Plan], model: str) -> None:
    """It lies there as in the file, and its bytes are neither planned nor taken in VRAM."""
    whole, chosen = planned(model), planned(model, overrides=["embed=pinned"])
    assert unbuilt(chosen) == ""
    (name,) = chosen.shared
    assert name == "token_embd.weight"
    with Gguf.open(chosen.model[0]) as gguf, open_engine(chosen) as engine:
        weight = engine.model.token_embd
        there = np.ctypeslib.as_array((ctypes.c_uint8 * weight.nbytes).from_address(weight.ptr))
        assert there.tobytes() == gguf.data(name).tobytes()
        assert weight.ptr in gpu.registered
        assert engine.ops.device.taken["weights"] <= chosen.ranks[0].memory["weights"]
        steps(engine)
    assert chosen.ranks[0].memory["weights"] <= whole.ranks[0].memory["weights"]
    del engine, weight
    gc.collect()
    assert gpu.registered == []


def test_an_ngram_table_in_the_file(
    gpu: Any, planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are read in the middle of each step, and a prompt's are asked for ahead."""
    chosen = planned("qwen4exp", overrides=["ngram=mapped"])
    assert unbuilt(chosen) == ""
    (staged,) = chosen.staged.values()
    assert chosen.ranks[0].host["staging"] == staged

    def call(function: int, argument: int, stream: int) -> None:
        gpu.launches.append("call")
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)

    monkeypatch.setattr("voltapile.kernels.cuda.submit.call", call)
    with open_engine(chosen) as engine:
        stage = engine.model.grams()[0].table.stage
        assert stage.numbers.nbytes + stage.data.nbytes == staged
        assert gpu.launches.count("call") == len(chosen.buckets) + len(engine.chunks)
        gpu.launches.clear()
        asked: list[Any] = []
        monkeypatch.setattr(stage, "expect", asked.append)
        steps(engine)
        assert gpu.launches.count("call") == 1, "the prompt's, which is not recorded"
        assert len(asked) == 3, "of each row with tokens"
        stage.check()


def test_no_output_matrix_is_unpacked(gpu: Any, planned: Callable[..., Plan]) -> None:
    """Even if all tokens of a prompt have outputs, as its probabilities want them."""
    chosen = planned("qwen3", slots=80)
    with open_engine(chosen) as engine:
        multiplied: list[tuple[int, ...]] = []
        engine.ops.product = lambda weight, *_: multiplied.append(weight.shape)
        for count in (80, 100):
            assert sum(map(len, engine.prompts.logits(0, np.zeros(count, np.int32), 0))) == count
        assert len(multiplied) >= 2, "a prompt's rows go there"
        assert all(shape[0] != engine.model.spec.vocab for shape in multiplied)


def steps(engine: Engine) -> None:
    """A prompt of three rows, four steps of as many."""
    engine.ops.fetch = lambda arrays: _Zeros(arrays)
    pages = [[[1 + slot] for _ in engine.plan.caches] for slot in range(3)]
    rows = [
        Row(slot=slot, tokens=list(range(5, 60)), pages=pages[slot], sample=True)
        for slot in range(3)
    ]
    engine.run(Step(id=0, rows=rows))
    for number in range(4):
        engine.run(Step(id=number, rows=[Row(slot=slot) for slot in range(3)]))


class _Zeros:
    def __init__(self, arrays: Any) -> None:
        self._arrays = arrays

    def is_there(self) -> bool:
        return True

    def take(self) -> list[Any]:
        return [np.zeros(each.shape, each.dtype) for each in self._arrays]


@pytest.mark.parametrize("prompt", [0, 200])
def test_launches_are_about_as_many_as_the_roofline_counts(
    gpu: Any, mini: Path, planned: Callable[..., Plan], prompt: int
) -> None:
    chosen = planned("qwen3")
    with Gguf.open(chosen.model[0]) as gguf, open_engine(chosen) as engine:
        gpu.launches.clear()
        if prompt:
            work = roofline.prefill(spec_of(gguf), chosen, prompt)
            row = Row(slot=0, tokens=np.zeros(prompt, np.int32), sample=True)
            batch = engine.buffer.fill([row])
        else:
            work = roofline.decode(spec_of(gguf), chosen, [1])
            batch = engine.buffer.fill([], 1, engine.caches.padding_slot)
        engine.ops.reset_scratch()
        engine._forward(batch)
    assert len(gpu.launches) == pytest.approx(work.launches, rel=0.3)


def test_every_request_that_is_refused_is_told_beside_the_plan(
    gpu: Any, planned: Callable[..., Plan]
) -> None:
    chosen = planned()
    load(chosen)
    whole = list(gpu.requests)
    assert {"memory", "host memory", "context", "module", "graph"} <= set(whole)
    for number, what in enumerate(whole):
        gpu.requests.clear()
        gpu.refused = number
        with pytest.raises(MemoryError) as error:
            load(chosen)
        told = str(error.value)
        assert gpu.requests[-1] == what
        assert "has no room for " in told
        assert "bytes are free" in told
        assert "; the plan has weights " in told
    assert "weights has " in told, "what was taken before"


def test_a_card_that_others_use_ends_a_command_with_exit_code_1(
    gpu: Any,
    mini: Path,
    computer: machine.Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "machine.json"
    machine.save(computer, path)
    gpu.total = 100 << 20
    argv = ["bench", "-m", str(mini / "llama/model-f16.gguf"), "--backend", "cuda"]
    assert main.main([*argv, "--machine", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.splitlines()[-1]
    assert last.startswith("voltapile: the GPU has no room for ")
    assert "of 104857600 bytes are free" in last
    assert "; the plan has weights " in last


def test_other_errors_come_out_as_they_are(fake_cupy: Any, gpu: Any) -> None:
    from voltapile.kernels.cuda import device

    with pytest.raises(fake_cupy.CUDARuntimeError, match="700"), device.room_for("anything"):
        raise fake_cupy.CUDARuntimeError(700)


def test_what_follows_a_call_has_no_kernel_to_start_beside(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from voltapile.kernels.cuda import device, submit

    class Early:
        def __init__(self, function: int) -> None:
            pass

        def launch(self, *args: Any) -> None:
            gpu.launches.append("early")

    monkeypatch.setattr(submit, "Submission", Early)
    monkeypatch.setattr(submit, "call", lambda *args: gpu.launches.append(args))
    card = device.Device(0)
    kernel = card.function(b"", "plain", is_early=True)
    kernel((1,), 32, ())
    card.call(5, 6)
    kernel((1,), 32, ())
    kernel((1,), 32, ())
    assert gpu.launches == ["early", (5, 6, card.stream.ptr), "plain", "early"]


def test_what_a_launch_holds_of_the_multiprocessors(fake_cupy: Any, gpu: Any) -> None:
    """Registers, where it has a block on most of the 80."""
    from voltapile.kernels.cuda import device

    card = device.Device(0)
    kernel, held = card.function(b"", "plain"), []
    for grid in ((60,), (59,), (2, 40), (3, 60), (1000,)):
        kernel(grid, 128, ())
        held.append(card.trail.held)
    assert held == [12800, 0, 12800, 3 * 12800, 5 * 12800]


def test_host_memory_that_two_ranks_of_a_process_ask_for(gpu: Any) -> None:
    from voltapile.kernels.cuda import device

    one, two = device.Device(0), device.Device(0)
    assert [each.register(4096, 4096) for each in (one, two)] == [4096] * 2
    one.unregister(4096)
    assert gpu.registered == [4096]
    two.unregister(4096)
    assert gpu.registered == []
    two.register(4096, 4096)  # whatever is mapped there by now
    assert gpu.registered == [4096]
    two.unregister(4096)
