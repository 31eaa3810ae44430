"""Makes Plans: a pure function of (Spec, tensors, Machine, Backend, Options).

Everything is decided here, before a byte is loaded; what does not fit is a message with numbers
and the options that would help. Knows no device and no file beyond its table of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from voltapile.topology.budget import ShortageError
from voltapile.topology.choices import as_chosen, chosen
from voltapile.topology.draft import Draft, TensorTable, draft_of, finish
from voltapile.topology.forecast import forecast, rate
from voltapile.topology.machine import Machine
from voltapile.topology.plan import (
    Backend,
    OptionError,
    Options,
    Plan,
    PlanError,
    sealed,
    unbuilt,
)
from voltapile.topology.ranks import seen, spreads
from voltapile.topology.spec import Spec, SpecError

LEAST_ASKED = 32  # tokens of a context: a chat template alone takes as many
MOST_STEPS = 16  # in flight
WORTH = 1.05  # times as fast a Plan must be for more GPUs


def plan(
    spec: Spec, gguf: TensorTable, machine: Machine, backend: Backend, options: Options
) -> Plan:
    """The Plan of this model on that machine. Raises PlanError."""
    try:
        found = _best(_drafts(spec, gguf, machine, backend, options), gguf)
    except ShortageError as error:
        advice = _remedies(spec, gguf, machine, backend, options)
        raise PlanError(f"{error}: {advice}") from None
    return sealed(found)


def largest_context(
    spec: Spec,
    gguf: TensorTable,
    machine: Machine,
    backend: Backend,
    options: Options,
    ranks: int = 0,
) -> int:
    """Most tokens that one request could use here, on so many ranks if not 0, without moving more
    out of VRAM; 0 if the model does not fit at all."""
    drafts = _drafts(spec, gguf, machine, backend, options)
    chosen = [each for each in drafts if len(each.layout.spread.shares) == ranks]
    return max(draft.budget.largest for draft in chosen or drafts)


def _drafts(
    spec: Spec, gguf: TensorTable, machine: Machine, backend: Backend, options: Options
) -> list[Draft]:
    """One for each way of spreading the model that the options leave open."""
    _check(options)
    spec = _as_chosen(spec, options)
    _check_tokens(spec, backend, options)
    _check_formats(spec, gguf, backend)
    machine = seen(machine, backend, options)
    warnings: list[str] = []
    ways = spreads(spec, gguf.tensors, machine, backend, options, warnings)
    return [draft_of(spec, gguf, machine, backend, options, way, warnings) for way in ways]


def _as_chosen(spec: Spec, options: Options) -> Spec:
    """Raises PlanError."""
    try:
        return as_chosen(spec, chosen(options))
    except SpecError as error:
        raise OptionError(str(error)) from None


def _check(options: Options) -> None:
    """Numbers that a caller may have got wrong."""
    limits = {
        "-c": (options.context, 0),
        "-np": (options.slots, 0),
        "-t": (options.threads, 0),
        "-b": (options.batch_tokens, 1),
        "-ngl": (options.gpu_layers, -1),
        "--n-cpu-moe": (options.cpu_moe, 0),
    }
    for option, (value, least) in limits.items():
        if not least <= value < 2**31:
            raise OptionError(f"{option} {value}: expected {least} to 2^31 - 1")
    if 0 < options.context < LEAST_ASKED:
        raise OptionError(
            f"-c {options.context}: expected {LEAST_ASKED} at least, or 0: as trained"
        )
    if not 0 <= options.steps_in_flight <= MOST_STEPS:
        raise OptionError(
            f"--steps-in-flight {options.steps_in_flight}: expected 1 to {MOST_STEPS}, or 0 to "
            "choose"
        )


def _check_tokens(spec: Spec, backend: Backend, options: Options) -> None:
    """Of a step, which has a row for each slot at least. Raises PlanError."""
    most = backend.most_tokens // spec.streams
    for option, value in (("-b", options.batch_tokens), ("-np", options.slots)):
        if most and value > most:
            raise OptionError(
                f"{option} {value}: the {backend.name} backend takes {most} tokens of this model "
                "in a step at most"
            )


def _check_formats(spec: Spec, gguf: TensorTable, backend: Backend) -> None:
    """Of tensors that somebody reads."""
    unread = spec.unknown_tensors, tuple(f"blk.{layer}." for layer in spec.unused_layers)
    for name, tensor in gguf.tensors.items():
        if name in unread[0] or name.startswith(unread[1]):
            continue
        if tensor.type_name not in backend.formats:
            raise PlanError(
                f"tensor {name!r} has type {tensor.type_name}, which the {backend.name} backend "
                f"cannot compute with; supported: {', '.join(backend.formats)}"
            )


def _best(drafts: Sequence[Draft], gguf: TensorTable) -> Plan:
    """The Plan with the fastest token, by forecast; of several that are as fast, the one with the
    fewest ranks. Raises ShortageError where none fits."""
    plans: list[tuple[float, Plan]] = []
    shortages: list[ShortageError] = []
    for draft in drafts:
        try:
            found = finish(draft, gguf)
        except ShortageError as error:
            shortages.append(error)
            continue
        told = forecast(draft.layout.spec, draft.layout.tensors, found, draft.layout.machine)
        plans.append((told.decode if told else 0.0, found))
    if not plans:
        raise shortages[0]
    best = max(speed for speed, _ in plans)
    speed, found = [each for each in plans if each[0] * WORTH >= best][-1]
    if len(drafts) > 1 and speed:
        slower = [f"{rate(each)} with {len(p.ranks)}" for each, p in plans if p is not found]
        note = (
            f"{len(found.ranks)} of {len(drafts[0].layout.spread.places)} GPUs: "
            f"{rate(speed)} tokens a second are predicted, "
            f"{', '.join(slower) or 'and fewer do not hold the model'}"
        )
        found = msgspec.structs.replace(found, notes=[*found.notes, note])
    return found


def _remedies(
    spec: Spec, gguf: TensorTable, machine: Machine, backend: Backend, options: Options
) -> str:
    """Changes of options of which each alone would make it fit; else what is left to do."""
    change = msgspec.structs.replace
    smaller = "q8_0" if "q8_0" in backend.kv_types else ""
    largest = largest_context(spec, gguf, machine, backend, options)
    trials = {
        f"-c {largest}": change(options, context=largest),
        f"-ctk {smaller} -ctv {smaller}": change(
            options, cache_type_k=smaller, cache_type_v=smaller
        ),
        "-np 1": change(options, slots=1),
        "-b 128": change(options, batch_tokens=min(128, options.batch_tokens)),
        "--fit on": change(options, fit=True),
        "--kv-split positions": change(options, kv_split="positions"),
        "no -ts": change(options, tensor_split=[]),
        "no --no-mmap": change(options, no_mmap=False),
        "--ngram-table mapped": change(options, overrides=["ngram=mapped", *options.overrides]),
    }
    found = []
    for text, trial in trials.items():
        if trial == options or (text == "-c 0") or ("ngram" in text and not spec.ngrams):
            continue
        try:
            helped = _best(_drafts(spec, gguf, machine, backend, trial), gguf)
        except PlanError:
            continue
        if not unbuilt(helped):
            found.append(text)
    if not found:
        found = ["a smaller model or quantisation"]
        found += ["-ngl 0 for the CPU"] if backend.in_vram else []
    return f"use {', or '.join(found)}"
