"""The options that several subcommands share: which model, how much of it, on what.

Named as llama-server's where they mean the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from voltapile.topology.machine import Machine
    from voltapile.topology.plan import Plan

DEFAULT_BACKEND = "auto"
BACKENDS = ("auto", "cpu", "cuda", "reference")


def add_model_options(
    parser: argparse.ArgumentParser,
    *,
    requires_model: bool = True,
    threads: Callable[[str], Any] = int,
) -> None:
    """Everything that goes into a Plan. threads: reads -t, which a bench takes as a list."""
    add = parser.add_argument
    add("-m", "--model", required=requires_model, metavar="FILE",
        help="GGUF file, or any shard of one")  # fmt: skip
    add("-c", "--ctx-size", type=int, default=0, metavar="N",
        help="tokens that one request may use; 0: as trained, if that fits")  # fmt: skip
    add("-np", "--parallel", type=int, default=0, metavar="N",
        help="requests computed at once; 0: choose")  # fmt: skip
    add("-t", "--threads", type=threads, default="0", metavar="N",
        help="CPU threads; 0: one for each core of a node")  # fmt: skip
    add("-b", "--batch-size", type=int, default=512, metavar="N",
        help="most tokens of one step")  # fmt: skip
    add("-ctk", "--cache-type-k", default="", metavar="TYPE", help="type of the cached keys")
    add("-ctv", "--cache-type-v", default="", metavar="TYPE", help="type of the cached values")
    add("-a", "--alias", default="", metavar="NAME", help="the model's name for clients")
    add("-ngl", "--n-gpu-layers", "--gpu-layers", dest="gpu_layers", type=int, default=-1,
        metavar="N", help="0 keeps the GPU out; anything else is all layers")  # fmt: skip
    add("-dev", "--device", default="auto", type=device, metavar="DEVICES",
        help="cpu, cuda, or GPUs by number: cuda:0,cuda:2")  # fmt: skip
    add("--ranks", type=int, default=0, metavar="N",
        help="worker processes that compute together; 0: choose")  # fmt: skip
    add("-sm", "--split-mode", default="", choices=("none", "layer", "tensor", "experts", "row"),
        help="how ranks share the model: whole layers, a part of each, or experts")  # fmt: skip
    add("-ts", "--tensor-split", default=[], type=parts, metavar="N,N,...",
        help="how much each rank takes, e.g. 3,1; equal without it")  # fmt: skip
    add("--no-mmap", action="store_true",
        help="copy the weights into huge pages: a slower start, faster decoding")  # fmt: skip
    add("--backend", default=DEFAULT_BACKEND, choices=BACKENDS,
        help="who computes; auto: cuda where there is a GPU, else cpu")  # fmt: skip
    add("--machine", default=None, metavar="FILE", help="plan for the machine in this JSON file")


def parts(text: str) -> list[float]:
    """The numbers of -ts. Raises ValueError."""
    return [float(each) for each in text.replace("/", ",").split(",")]


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
    """As draft_plan, but a Plan that can be carried out. Raises PlanError."""
    plan = draft_plan(args, endpoint)
    refuse_unbuilt(plan)
    return plan


def refuse_unbuilt(plan: Plan) -> None:
    """Raises PlanError for a Plan that this version can make and not carry out."""
    from voltapile.topology.plan import PlanError
    from voltapile.workers.models.registry import computable

    known = computable(plan.backend)
    if plan.architecture not in known:
        raise PlanError(
            f"{plan.alias}: {plan.architecture} models can be planned (voltapile plan) and not "
            f"computed by the {plan.backend} backend yet; those that can: {', '.join(known)}"
        )


def draft_plan(args: argparse.Namespace, endpoint: str = "") -> Plan:
    """The Plan that the options ask for. Raises GgufError, SpecError, MachineError, PlanError.

    endpoint: ZeroMQ address; without one it follows from the Plan, so that a gateway and a worker
    started apart with the same options meet.
    """
    from voltapile.kernels.backend import describe
    from voltapile.shm.gguf import Gguf
    from voltapile.topology import machine
    from voltapile.topology.architectures import spec_of
    from voltapile.topology.plan import Backend, Options
    from voltapile.topology.planner import plan

    options = Options(
        context=args.ctx_size,
        slots=args.parallel,
        threads=args.threads,
        batch_tokens=args.batch_size,
        cache_type_k=args.cache_type_k,
        cache_type_v=args.cache_type_v,
        endpoint=endpoint or getattr(args, "endpoint", None) or "",
        alias=args.alias,
        no_mmap=args.no_mmap,
        ranks=args.ranks,
        split_mode=args.split_mode,
        tensor_split=args.tensor_split,
        devices=devices(args.device),
    )
    with Gguf.open(Path(args.model).expanduser()) as gguf:
        computer = machine.load(args.machine) if args.machine else machine.probe()
        backend = Backend(**describe(choose_backend(args, computer)))
        return plan(spec_of(gguf), gguf, computer, backend, options)


def choose_backend(args: argparse.Namespace, computer: Machine) -> str:
    """The backend that --backend and -ngl ask for on this computer."""
    import importlib.util

    if args.backend != "auto":
        return str(args.backend)
    if args.device != "auto":
        return "cpu" if args.device == "cpu" else "cuda"
    has_gpu = bool(computer.gpus) and importlib.util.find_spec("cupy") is not None
    return "cuda" if has_gpu and args.gpu_layers != 0 else "cpu"
