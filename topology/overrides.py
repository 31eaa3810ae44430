"""Rules of -ot: which tensors go to which place. Ordered; a tensor obeys the first that matches.

    regex=place[,regex=place...]     a regular expression that a tensor's name contains
    role=place, role[0-11]=place     a role of tensors (ROLES), of all layers or of some

Places: vram, pinned, host (or CPU), mapped; cuda:N (or CUDAN), rank:N for all of it on one. Knows
names, not bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from voltapile.topology.plan import OptionError, Options
from voltapile.topology.spec import Spec

TIERS = {
    "vram": "vram", "gpu": "vram", "cuda": "vram",
    "pinned": "pinned", "cuda_host": "pinned",
    "host": "host", "cpu": "host",
    "mapped": "mapped", "disk": "mapped", "mmap": "mapped",
}  # fmt: skip
ROLES = (
    "embed", "head", "ngram", "norm", "attention", "delta_net", "ffn", "experts", "shared_expert",
    "router", "indexer", "streams", "ple",
)  # fmt: skip
_STEMS = {
    "attention": ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"),
    "delta_net": (
        "attn_gate", "ssm_conv1d", "ssm_dt", "ssm_a", "ssm_beta", "ssm_alpha", "ssm_ba", "ssm_in",
        "ssm_out",
    ),
    "ffn": ("ffn_gate", "ffn_up", "ffn_down"),
    "experts": ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps"),
    "shared_expert": ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    "router": ("ffn_gate_inp", "ffn_gate_inp_shexp"),
    "indexer": ("indexer",),
    "ple": ("ple_key", "ple_value", "ple_conv1d"),
}  # fmt: skip
_ROLE_OF_STEM = {stem: role for role, stems in _STEMS.items() for stem in stems}
_ENDS = {"token_embd": "embed", "output": "head", "per_layer_token_embd": "ngram"}
_ROLE_RULE = re.compile(r"([a-z_]+)(?:\[(\d+)(?:-(\d+))?\])?")
_DEVICE = re.compile(r"(cuda|gpu|rank):?(\d+)")


@dataclass(frozen=True)
class Place:
    """tier: as Placement has it. rank: that keeps it whole; -1: each rank its part."""

    tier: str
    rank: int = -1

    def __str__(self) -> str:
        return self.tier if self.rank < 0 else f"rank {self.rank}"


@dataclass(frozen=True)
class Rule:
    """One rule and what it matches: a pattern of names, or roles and layers; all where none is
    said."""

    text: str
    place: Place
    pattern: re.Pattern[str] | None = None
    roles: tuple[str, ...] = ()
    layers: tuple[int, int] | None = None  # first and last
    keeps_cache: bool = True  # keys and values of its layers stay in VRAM

    def matches(self, name: str, role: str) -> bool:
        if self.pattern is not None:
            return self.pattern.search(name) is not None
        if self.layers is not None and not self.layers[0] <= layer_of(name) <= self.layers[1]:
            return False
        return not self.roles or role in self.roles


@dataclass
class Obeyed:
    """What rules decided. matched, taken: of each rule, names; taken are those it was first for."""

    places: dict[str, Place] = field(default_factory=dict)
    matched: list[list[str]] = field(default_factory=list)
    taken: list[list[str]] = field(default_factory=list)


def obey(rules: Sequence[Rule], names: Iterable[str], spec: Spec) -> Obeyed:
    """Ask the rules about each tensor, in order."""
    found = Obeyed(matched=[[] for _ in rules], taken=[[] for _ in rules])
    for name in names:
        role = role_of(name, spec)
        for number, rule in enumerate(rules):
            if rule.matches(name, role):
                found.matched[number].append(name)
                if name not in found.places:
                    found.places[name] = rule.place
                    found.taken[number].append(name)
    return found


def faults(rules: Sequence[Rule], obeyed: Obeyed) -> list[str]:
    """Warnings of rules that do nothing."""
    warnings = []
    for number, rule in enumerate(rules):
        if not obeyed.matched[number]:
            warnings.append(f"{rule.text}: matches no tensor of this model")
        elif not obeyed.taken[number]:
            name = obeyed.matched[number][0]
            first = next(r for i, r in enumerate(rules) if name in obeyed.taken[i])
            warnings.append(
                f"{rule.text}: takes nothing, since what it matches is taken before by "
                f"{first.text}; put it first"
            )
    return warnings


def rules_of(options: Options, spec: Spec, devices: Mapping[str, int], ranks: int) -> list[Rule]:
    """The rules of all options: -ot in its order, then --n-cpu-moe, then -ngl.

    devices: name of each GPU that is used -> its rank. Raises PlanError."""
    found = [
        _rule(item, devices, ranks) for text in options.overrides for item in split_rules(text)
    ]
    if options.cpu_moe:
        if spec.experts is None:
            raise OptionError(
                f"--n-cpu-moe {options.cpu_moe}: a {spec.architecture} model has no experts; "
                "leave it out, or use -ngl"
            )
        is_all = options.cpu_moe >= spec.layers
        text = "--cpu-moe" if is_all else f"--n-cpu-moe {options.cpu_moe}"
        layers = 0, options.cpu_moe - 1
        found.append(Rule(text, Place("host"), roles=("experts",), layers=layers))
    # As llama-server counts: the output matrix is one layer more, and the last ones stay.
    first = spec.layers + 1 - options.gpu_layers
    if options.gpu_layers >= 0 and first > 0:
        outside = (0, first - 1) if first <= spec.layers else None
        text = f"-ngl {options.gpu_layers}"
        found.append(Rule(text, Place("host"), layers=outside, keeps_cache=False))
    return found


def split_rules(text: str) -> list[str]:
    """Rules between commas; a comma within a regular expression has no place before it."""
    items: list[str] = []
    for piece in text.split(","):
        if items and "=" not in items[-1]:
            items[-1] += "," + piece
        else:
            items.append(piece)
    return items


def role_of(name: str, spec: Spec) -> str:
    """What a tensor is for, one of ROLES."""
    parts = name.split(".")
    if parts[0] != "blk":
        return _ENDS.get(parts[0], "streams" if "_hc_" in name else "norm")
    stem = parts[2] if len(parts) > 2 else ""
    if stem.startswith("hc_"):
        return "streams"
    if stem == "attn_qkv" and spec.delta and int(parts[1]) in spec.delta.layers:
        return "delta_net"
    return _ROLE_OF_STEM.get(stem, "norm")


def layer_of(name: str) -> int:
    """-1: of no layer."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and parts[1].isdigit() else -1


def _rule(text: str, devices: Mapping[str, int], ranks: int) -> Rule:
    target, is_rule, where = text.strip().rpartition("=")
    shown = f"-ot {text.strip()}"
    if not is_rule or not target or not where:
        raise OptionError(f"{shown}: expected regex=place, e.g. experts=host or ffn_.*_exps=CPU")
    place = _place(shown, where, devices, ranks)
    if role := _ROLE_RULE.fullmatch(target):
        name = "delta_net" if role[1] == "gdn" else role[1]
        if name in ROLES:
            layers = (int(role[2]), int(role[3] or role[2])) if role[2] else None
            return Rule(shown, place, roles=(name,), layers=layers)
    try:
        return Rule(shown, place, pattern=re.compile(target))
    except re.error as error:
        raise OptionError(
            f"{shown}: {target} is no regular expression ({error}); a role is one of "
            f"{', '.join(ROLES)}"
        ) from None


def _place(shown: str, where: str, devices: Mapping[str, int], ranks: int) -> Place:
    word = where.strip().lower()
    if word in TIERS:
        return Place(TIERS[word])
    if found := _DEVICE.fullmatch(word):
        number = int(found[2])
        rank = number if found[1] == "rank" else devices.get(f"cuda:{number}", -1)
        if 0 <= rank < ranks:
            return Place("vram", rank)
    there = ", ".join(name for name in devices if name.startswith("cuda")) or "no GPU"
    raise OptionError(
        f"{shown}: there is no place {where.strip()!r}; expected vram, pinned, host (CPU), mapped "
        f"or a GPU that is used ({there})"
    )
