"""The options that several subcommands share: which model, how much of it, on what.

Named as llama-server's where they mean the same.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voltapile.gateway.cli.llama_server import add_without_effect
from voltapile.gateway.cli.parser import UsageError

if TYPE_CHECKING:
    from voltapile.shm.gguf import Gguf
    from voltapile.topology.machine import Machine
    from voltapile.topology.plan import Backend, Options, Plan
    from voltapile.topology.spec import Spec

DEFAULT_BACKEND = "auto"
BACKENDS = ("auto", "cpu", "cuda", "reference")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
EVERY_LAYER = (1 << 31) - 1


def add_model_options(
    parser: argparse.ArgumentParser,
    *,
    requires_model: bool = True,
    threads: Callable[[str], Any] = int,
) -> None:
    """Everything that goes into a Plan. threads: reads -t, which a bench takes as a list."""
    add = parser.add_argument
    add("-m", "--model", required=requires_model, metavar="FILE",
        help="GGUF file, or any shard of one; demo: SmolLM2, fetched once")  # fmt: skip
    add("-c", "--ctx-size", type=int, default=0, metavar="N",
        help="tokens that one request may use; 0: as trained, if that fits")  # fmt: skip
    add("-np", "--parallel", type=int, default=0, metavar="N",
        help="requests computed at once; 0: choose")  # fmt: skip
    add("-t", "--threads", type=threads, default="0", metavar="N",
        help="CPU threads of all ranks; 0: one for each core of a node")  # fmt: skip
    add("-b", "--batch-size", type=int, default=512, metavar="N",
        help="most tokens of one step")  # fmt: skip
    add("-ub", "--ubatch-size", type=int, default=0, metavar="N",
        help="the same: the smaller one counts")  # fmt: skip
    add("--steps-in-flight", type=int, default=0, metavar="N",
        help="steps under way at once; 0: 2, or 1 in layer mode")  # fmt: skip
    add(
        "-ctk",
        "--cache-type-k",
        default="",
        metavar="TYPE",
        help="type of the cached keys: f16, f32 or q8_0",
    )
    add(
        "-ctv",
        "--cache-type-v",
        default="",
        metavar="TYPE",
        help="type of the cached values: f16, f32 or q8_0",
    )
    add("-a", "--alias", default="", metavar="NAME", help="the model's name for clients")
    add("--no-mmap", action="store_true",
        help="copy the weights into huge pages: a slower start, faster decoding")  # fmt: skip
    add("--backend", default=DEFAULT_BACKEND, choices=BACKENDS,
        help="who computes; auto: cuda where there is a GPU, else cpu")  # fmt: skip
    add("--machine", default=None, metavar="FILE", help="plan for the machine in this JSON file")
    _add_family_options(parser)
    _add_placement_options(parser)
    add_without_effect(parser)


def _add_family_options(parser: argparse.ArgumentParser) -> None:
    """What matters to some families of models: states, n-grams, indexers, ropes."""
    add = parser.add_argument
    add("-ctxcp", "--ctx-checkpoints", dest="checkpoints", type=int, default=32, metavar="N",
        help="states of a hybrid model that are kept for later turns, for each of -np")  # fmt: skip
    add("-cpent", "--checkpoint-every-n-tokens", dest="checkpoint_tokens", type=int, default=4096,
        metavar="N", help="of a prompt between two of them")  # fmt: skip
    add("-cram", "--cache-ram", type=mebibytes, default=-1, metavar="MIB",
        help="host memory for them; -1: a part of what is free, up to 8192")  # fmt: skip
    add("--ngram-table", default="", choices=("pinned", "mapped"),
        help="a table of n-grams in host memory, or in the file on a drive")  # fmt: skip
    add("--compress-ratio", type=int, default=0, metavar="N",
        help="positions of a block that an indexer chooses, where the file says 0")  # fmt: skip
    add("--rope-scaling", default="", choices=("none", "linear", "yarn"),
        help="how positions are scaled; without it as the file says")  # fmt: skip
    add("--rope-scale", type=float, default=0.0, metavar="N", help="reach so many times as far")
    add("--yarn-orig-ctx", type=int, default=0, metavar="N",
        help="the context that the model was trained with before that")  # fmt: skip
    add("--router-input", default="bf16", choices=("bf16", "f32"),
        help="f32: do not round it where a model's router was trained on BF16")  # fmt: skip


def _add_placement_options(parser: argparse.ArgumentParser) -> None:
    """Which GPUs and ranks, and what lies in which memory."""
    add = parser.add_argument
    add("-dev", "--device", default="auto", type=device, metavar="DEVICES",
        help="cpu, cuda, or GPUs by number: cuda:0,cuda:2")  # fmt: skip
    add("--ranks", type=int, default=0, metavar="N",
        help="worker processes that compute together; 0: choose")  # fmt: skip
    add("--kv-split", default="", choices=("heads", "positions"),
        help="what ranks share out of keys and values; positions: where there are more ranks than "
        "KV heads, each then keeps a part of every context")  # fmt: skip
    add("-sm", "--split-mode", default="", choices=("none", "layer", "tensor", "experts", "row"),
        help="how ranks share the model: whole layers, a part of each, or experts")  # fmt: skip
    add("-ts", "--tensor-split", default=[], type=parts, metavar="N,N,...",
        help="how much each rank takes, e.g. 3,1; equal without it")  # fmt: skip
    add("--islands", default=[], type=numbers, metavar="N,N,...",
        help="the island of each rank, whatever links there are; ranks of two islands meet in host "
        "memory")  # fmt: skip
    add("-ngl", "--n-gpu-layers", "--gpu-layers", dest="gpu_layers", type=int, default=-1,
        metavar="N", help="last layers in VRAM; 0 keeps the GPU out, -1: all")  # fmt: skip
    add("-ncmoe", "--n-cpu-moe", dest="cpu_moe", type=int, default=0, metavar="N",
        help="first layers whose experts stay in host memory")  # fmt: skip
    add("-cmoe", "--cpu-moe", dest="cpu_moe", action="store_const", const=EVERY_LAYER,
        help="all experts stay in host memory")  # fmt: skip
    add("-ot", "--override-tensor", action="append", default=[], metavar="WHAT=PLACE,...",
        help="where tensors go: a regular expression or a role (experts, attention, ngram, ...), "
        "= vram, pinned, host, mapped or cuda:N; the first rule that matches counts")  # fmt: skip
    add("-fit", "--fit", default="on", choices=("on", "off"),
        help="move out of VRAM what does not fit and no rule speaks of")  # fmt: skip
    add("--host-memory", type=size, metavar="SIZE",
        help="free memory of the host, e.g. 64G, instead of what is seen")  # fmt: skip
    add("--vram", type=sizes, default=[], metavar="SIZE,...",
        help="free memory of each GPU, or of all of them, instead of what is seen")  # fmt: skip
    add("--margin", type=size, default="256M", metavar="SIZE",
        help="memory of each device that stays free")  # fmt: skip


def parts(text: str) -> list[float]:
    """The numbers of -ts. Raises ValueError."""
    return [float(each) for each in text.replace("/", ",").split(",")]


def mebibytes(text: str) -> int:
    """The number of -cram, -1: choose. Raises ValueError."""
    if int(text) < -1:
        raise ValueError(text)
    return int(text)


def numbers(text: str) -> list[int]:
    """Raises ValueError."""
    return [int(each) for each in text.split(",")]


def size(text: str) -> int:
    """Bytes: a number with K, M, G or T behind it; without a letter GiB. Raises ValueError."""
    word = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = UNITS.get(word[-1:], 0)
    number = float(word[:-1] if unit else word)
    if not 0 <= number < 1 << 40:
        raise ValueError(text)
    return int(number * (unit or UNITS["G"]))


def sizes(text: str) -> list[int]:
    """Raises ValueError."""
    return [size(each) for each in text.split(",")]


def device(text: str) -> str:
    """Checks --device. Raises ValueError."""
    devices(text)
    return text


def devices(text: str) -> list[int]:
    """The GPUs that --device numbers; none for all that help. Raises ValueError."""
    if text in ("auto", "cpu", "cuda"):
        return []
    words = [word.removeprefix("cuda").removeprefix(":") for word in text.lower().split(",")]
    if not all(word.isdigit() for word in words):
        raise ValueError(text)
    return [int(word) for word in words]


def make_plan(args: argparse.Namespace, endpoint: str = "") -> Plan:
    """The Plan that the options ask for, if it can be carried out. Raises GgufError, SpecError,
    MachineError, PlanError.

    endpoint: ZeroMQ address; without one it follows from the Plan, so that a gateway and a worker
    started apart with the same options meet.
    """
    from msgspec.structs import replace

    inputs = read_inputs(args, endpoint)
    plan = inputs.plan()
    if unbuilt(plan) and inputs.options.fit:
        # Few weights outside VRAM can be computed with yet: what does not fit is told of at once.
        options = replace(inputs.options, fit=False)
        plan = dataclasses.replace(inputs, options=options).plan()
    refuse_unbuilt(plan)
    return plan


def read_plan(path: Path) -> Plan:
    """A Plan that `voltapile plan --json` printed, if it can be carried out. Raises PlanError."""
    from voltapile.topology.plan import from_json

    plan = from_json(path.read_bytes())
    refuse_unbuilt(plan)
    return plan


def refuse_unbuilt(plan: Plan) -> None:
    """Raises PlanError for a Plan that this version can make and not carry out."""
    from voltapile.topology.plan import PlanError

    if reason := unbuilt(plan):
        raise PlanError(f"{plan.alias}: {reason}")


def unbuilt(plan: Plan) -> str:
    """Why this version can make the Plan and not carry it out; "" if it can."""
    from voltapile.topology import plan as plans
    from voltapile.workers.models.registry import computable

    known = computable(plan.backend)
    if plan.architecture not in known:
        return (
            f"{plan.architecture} models can be planned (voltapile plan) and not computed by the "
            f"{plan.backend} backend yet; those that can: {', '.join(known)}"
        )
    return plans.unbuilt(plan)


@dataclass(frozen=True)
class Inputs:
    """All that a Plan is made from."""

    spec: Spec
    gguf: Gguf  # closed: its tables are there, its data are not
    machine: Machine
    backend: Backend
    options: Options

    def plan(self) -> Plan:
        from voltapile.topology.planner import plan

        return plan(self.spec, self.gguf, self.machine, self.backend, self.options)

    @property
    def trained_context(self) -> int:
        """What the model reaches, options of its rope included."""
        from voltapile.topology.choices import as_chosen, chosen

        return as_chosen(self.spec, chosen(self.options)).context

    def largest_context(self, ranks: int) -> int:
        """On so many ranks."""
        from voltapile.topology.planner import largest_context

        made_of = self.spec, self.gguf, self.machine, self.backend, self.options
        return largest_context(*made_of, ranks)


def read_inputs(args: argparse.Namespace, endpoint: str = "") -> Inputs:
    """Raises GgufError, SpecError, MachineError."""
    from voltapile.gateway.cli.environment import visible_gpus
    from voltapile.kernels.backend import describe
    from voltapile.shm.gguf import Gguf
    from voltapile.topology import machine
    from voltapile.topology.architectures import spec_of
    from voltapile.topology.plan import Backend

    with Gguf.open(model_path(args.model)) as gguf:
        is_told = bool(args.machine)
        computer = machine.load(args.machine) if is_told else machine.probe(seen=visible_gpus())
        backend = Backend(**describe(choose_backend(args, computer)))
        return Inputs(spec_of(gguf), gguf, computer, backend, options_of(args, endpoint))


def model_path(name: str) -> Path:
    """What -m names. Raises OSError, UsageError."""
    if not name:
        raise UsageError("-m: no file is named")
    if name == "demo":
        from voltapile.gateway.cli import demo

        return demo.fetch(demo.default_directory())
    return Path(name).expanduser()


def options_of(args: argparse.Namespace, endpoint: str = "") -> Options:
    from voltapile.topology.plan import Options

    return Options(
        context=args.ctx_size,
        slots=args.parallel,
        threads=args.threads,
        batch_tokens=min(args.batch_size, args.ubatch_size or args.batch_size),
        steps_in_flight=args.steps_in_flight,
        cache_type_k=args.cache_type_k,
        cache_type_v=args.cache_type_v,
        margin_bytes=args.margin,
        endpoint=endpoint or getattr(args, "endpoint", None) or "",
        alias=args.alias,
        no_mmap=args.no_mmap,
        checkpoints=args.checkpoints,
        checkpoint_tokens=args.checkpoint_tokens,
        checkpoint_bytes=args.cache_ram << 20 if args.cache_ram >= 0 else -1,
        router_input="f32" if args.router_input == "f32" else "",
        ranks=args.ranks,
        split_mode=args.split_mode,
        kv_split=args.kv_split,
        tensor_split=args.tensor_split,
        devices=devices(args.device),
        islands=args.islands,
        gpu_layers=args.gpu_layers,
        cpu_moe=args.cpu_moe,
        overrides=args.override_tensor
        + ([f"ngram={args.ngram_table}"] if args.ngram_table else []),
        rope_scaling=args.rope_scaling,
        rope_scale=args.rope_scale,
        rope_original=args.yarn_orig_ctx,
        compress_ratio=args.compress_ratio,
        fit=args.fit == "on",
        host_bytes=args.host_memory or 0,
        vram_bytes=args.vram,
    )


def choose_backend(args: argparse.Namespace, computer: Machine) -> str:
    """The backend that --backend and -ngl ask for on this computer."""
    import importlib.util

    if args.backend != "auto":
        return str(args.backend)
    if args.device != "auto":
        return "cpu" if args.device == "cpu" else "cuda"
    can_compute = args.machine or importlib.util.find_spec("cupy") is not None
    has_gpu = bool(computer.gpus) and can_compute
    return "cuda" if has_gpu and args.gpu_layers != 0 else "cpu"
