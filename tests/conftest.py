"""Fixtures that every tier shares: where models and goldens lie, engines over them, a leak hunt."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.backend import describe
from voltapile.shm.gguf import Gguf
from voltapile.topology import machine
from voltapile.topology.architectures import spec_of
from voltapile.topology.plan import Backend, Options, Plan
from voltapile.topology.planner import plan
from voltapile.workers.engine import Engine, open_engine
from voltapile.workers.protocol import Row, Sampled, Sampling, Step

ROOT = Path(__file__).parents[1]
PATIENCE = 3.0  # seconds that a test's threads and processes may take to end
CHUNK = 64
GOLDEN = ROOT.parent / "shared/golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ptx", help="folder of compute_70 PTX for a second run of the GPU tests")


@pytest.fixture(scope="session")
def data() -> Path:
    return ROOT / "tests/data"


@pytest.fixture(scope="session")
def mini(data: Path) -> Path:
    """The small golden models, committed."""
    return data / "golden-mini"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The large golden models, where they lie beside the project."""
    if not GOLDEN.is_dir():
        pytest.skip("the large golden set is not here")
    return GOLDEN


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """A device gets some of the golden files: what needs another is skipped there."""
    try:
        return (yield)
    except Exception as error:
        if name := lacking(error, GOLDEN):
            pytest.skip(f"{name} is not here, as the large golden set is not whole")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    """As above."""
    return (yield from pytest_pyfunc_call())


def lacking(error: Exception, golden: Path) -> str:
    """The golden file that was not found; "" if it was none, or if the set is whole, so that the
    test is wrong."""
    told = f"{error} {getattr(error, 'filename', '')}"
    named = re.search(re.escape(f"{golden}/") + r"([^\s:'\"]+)", told)
    if named is None or Path(named[0]).exists() or is_whole(golden):
        return ""
    return named[1]


def is_whole(golden: Path) -> bool:
    """Every file is there whose sum was written down."""
    sums = golden / "SHA256SUMS"
    if not sums.is_file():
        return False
    return all((golden / line.split()[1]).is_file() for line in sums.read_text().splitlines())


@pytest.fixture(scope="session")
def smollm2() -> Path:
    path = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.skip("SmolLM2 is not here; make serve fetches it")
    return path


PlanFor = Callable[..., Plan]
EngineFor = Callable[..., Engine]


@pytest.fixture(scope="session")
def plan_for() -> PlanFor:
    """plan_for(path, backend, **Options fields) -> Plan."""

    def make(path: Path, backend: str = "reference", **options: Any) -> Plan:
        chosen = Options(**{"context": 512, "slots": 4, "threads": 2, **options})
        with Gguf.open(path) as gguf:
            described = Backend(**describe(backend))
            return plan(spec_of(gguf), gguf, machine.probe(), described, chosen)

    return make


@pytest.fixture
def engine_for(plan_for: PlanFor) -> Iterator[EngineFor]:
    """engine_for(path, backend, **Options fields) -> a loaded Engine."""
    with contextlib.ExitStack() as stack:

        def make(path: Path, backend: str = "reference", **options: Any) -> Engine:
            return stack.enter_context(open_engine(plan_for(path, backend, **options)))

        yield make


class Driver:
    """Plays the gateway for an Engine: slots, pages and Steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.step_id = 0
        # Highest first, so that tables are out of order as soon as two requests share the pool.
        self.free = [list(range(1, group.pages)) for group in engine.plan.caches]
        self.held: dict[int, list[list[int]]] = {}

    def step(self, rows: Sequence[Row], release: Sequence[int] = ()) -> list[Sampled]:
        self.step_id += 1
        step = Step(id=self.step_id, rows=list(rows), release=list(release))
        result = self.engine.run(step)
        assert result.id == self.step_id
        return result.rows

    def start(
        self, slot: int, prompt: Sequence[int], room: int, chunk: int = 0, **sampling: Any
    ) -> list[Row]:
        """The rows that compute `prompt`, in chunks; pages for `room` more positions."""
        pages = []
        for free, group in zip(self.free, self.engine.plan.caches, strict=True):
            count = -(-(len(prompt) + room) // group.page_tokens)
            pages.append([free.pop() for _ in range(count)])
        self.held[slot] = pages
        chunk = chunk or len(prompt)
        rows = []
        for start in range(0, len(prompt), chunk):
            tokens = np.asarray(prompt[start : start + chunk], np.int32)
            is_last = start + chunk >= len(prompt)
            rows.append(Row(slot=slot, start=start, tokens=tokens, sample=is_last))
        rows[0].pages, rows[0].sampling = pages, Sampling(**sampling)
        return rows

    def release(self, slot: int) -> None:
        for free, pages in zip(self.free, self.held.pop(slot), strict=True):
            free.extend(pages)
        self.step([], [slot])

    def poison(self, layer: int, slot: int) -> None:
        """Make the first position's values of a slot's first page NaN in one layer."""
        engine, other = self.engine, self.engine.plan.slots - 1
        group = engine.plan.caches[0]
        assert other not in self.held
        engine.caches.append(other, [[self.held[slot][0][0]]])
        batch = engine.buffer.fill([Row(slot=other, tokens=np.zeros(1, np.int32))])
        keys = engine.ops.zeros((1, group.kv_heads * group.key_dim), np.float32)
        values = engine.ops.zeros((1, group.kv_heads * group.value_dim), np.float32)
        engine.ops.upload(values, np.full(values.shape, np.nan, np.float32))
        engine.ops.reset_scratch()
        engine.ops.store_kv(engine.caches.layers[layer].kv, keys, values, batch, 0)
        engine.ops.synchronize()
        engine.caches.release(other)

    def generate(
        self, prompt: Sequence[int], count: int, slot: int = 0, chunk: int = 0, **sampling: Any
    ) -> list[int]:
        """`count` tokens of one request that is alone."""
        tokens: list[int] = []
        for row in self.start(slot, prompt, count, chunk, **sampling):
            for answer in self.step([row]):
                tokens += answer.tokens
        for _ in range(count - 1):
            tokens += self.step([Row(slot=slot)])[0].tokens
        self.release(slot)
        return tokens


@pytest.fixture
def drive() -> Callable[[Engine], Driver]:
    return Driver


@pytest.fixture(scope="session")
def with_outliers() -> Callable[[Path, Path], Path]:
    """with_outliers(source, target) -> target, a model of float16 whose activations have them."""

    def make(source: Path, target: Path) -> Path:
        """The same function in exact numbers: a channel of each norm is 1,000 times larger, and the
        matching column of what reads it so much smaller."""
        readers = {"attn_norm": ("attn_q", "attn_k", "attn_v"), "ffn_norm": ("ffn_gate", "ffn_up")}
        shutil.copyfile(source, target)
        with Gguf.open(source) as gguf:
            tensors = {name: (t, gguf.data(name).copy()) for name, t in gguf.tensors.items()}
        with target.open("r+b") as file:

            def store(name: str, values: np.ndarray) -> None:
                file.seek(tensors[name][0].offset)
                file.write(values.tobytes())

            for name, (_, data) in tensors.items():
                block, _, rest = name.removesuffix(".weight").rpartition(".")
                if rest not in readers:
                    continue
                scales = data.view(np.float32).copy()
                channel = int(scales.argmax())
                scales[channel] *= 1000
                store(name, scales)
                for reader in readers[rest]:
                    tensor, raw = tensors[f"{block}.{reader}.weight"]
                    kind = {"F16": np.float16, "F32": np.float32}[tensor.type_name]
                    matrix = raw.view(kind).reshape(tensor.shape).copy()
                    matrix[:, channel] /= 1000
                    store(f"{block}.{reader}.weight", matrix)
        return target

    return make


def _children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found.update((task / "children").read_text().split())
    return found


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fail a test that leaves threads or child processes behind."""
    threads, children = set(threading.enumerate()), _children()
    yield
    deadline = time.monotonic() + PATIENCE
    while True:
        left = [t.name for t in set(threading.enumerate()) - threads if t.is_alive()]
        orphans = _children() - children
        if not left and not orphans:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: threads {left}, child processes {sorted(orphans)}")
        time.sleep(0.02)
