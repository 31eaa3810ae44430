"""A vocabulary as a GGUF file gives it: texts, kinds, merges or scores, and the ids with a role.

Ids are positions in `tokenizer.ggml.tokens` and nothing else, so that empty and duplicate texts
shift nothing. This file reads and checks the metadata; it does not know how text becomes ids.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
    }
)
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

log = logging.getLogger(__name__)


class TokenizerError(ValueError):
    """A vocabulary that cannot be used, or ids that it does not have."""


@dataclass(frozen=True)
class Vocabulary:
    """What the `tokenizer.ggml.*` keys say, checked; index i of every list is token id i."""

    model: str
    pre: str | None
    tokens: list[str]
    kinds: list[int]
    merges: list[tuple[str, str]]
    scores: Sequence[float]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    eog_ids: frozenset[int]
    add_bos: bool | None  # None: the file does not say
    add_eos: bool | None
    add_space_prefix: bool | None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        tokens = _texts(metadata, "tokens")
        model = _text(metadata, "model") or ""
        if not tokens:
            raise TokenizerError(
                "the file has no vocabulary: the key tokenizer.ggml.tokens is missing or empty"
                + (f" (tokenizer.ggml.model is '{model}')" if model else "")
            )
        kinds = _numbers(metadata, "token_type", [NORMAL] * len(tokens), Integral)
        kinds = [int(kind) for kind in kinds]
        _check_length("token_type", len(kinds), len(tokens))
        if not {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}.issuperset(kinds):
            raise TokenizerError(
                f"tokenizer.ggml.token_type holds {sorted(set(kinds))}; known kinds are 1 to 6"
            )
        scores = _numbers(metadata, "scores", (), Real)
        if len(scores):
            _check_length("scores", len(scores), len(tokens))
        return cls(
            model=model,
            pre=_text(metadata, "pre"),
            tokens=tokens,
            kinds=kinds,
            merges=_pairs(_texts(metadata, "merges")),
            scores=scores,
            bos_id=_role(metadata, "bos", len(tokens)),
            eos_id=_role(metadata, "eos", len(tokens)),
            unknown_id=_role(metadata, "unknown", len(tokens)),
            eog_ids=_end_ids(metadata, tokens, kinds),
            add_bos=_flag(metadata, "add_bos_token"),
            add_eos=_flag(metadata, "add_eos_token"),
            add_space_prefix=_flag(metadata, "add_space_prefix"),
        )

    def text_to_id(self) -> dict[str, int]:
        """Of equal texts a special token goes before a normal one, then the lowest id."""
        ids: dict[str, int] = {}
        for only_normal in (True, False):
            for i in range(len(self.tokens) - 1, -1, -1):
                if (self.kinds[i] == NORMAL) == only_normal and self.tokens[i]:
                    ids[self.tokens[i]] = i
        return ids

    def of_kind(self, *kinds: int) -> list[int]:
        return [i for i, kind in enumerate(self.kinds) if kind in kinds and self.tokens[i]]


def _get(metadata: Mapping[str, Any], key: str, default: Any) -> Any:
    return metadata.get(f"tokenizer.ggml.{key}", default)


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = _get(metadata, key, None)
    if value is not None and not isinstance(value, str):
        raise _unfit(key, value, "a text")
    return value


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = _get(metadata, key, ())
    if not _is_array(value) or not all(isinstance(each, str) for each in value):
        raise _unfit(key, value, "an array of texts")
    return list(value)


def _numbers(metadata: Mapping[str, Any], key: str, default: Sequence[Any], kind: type) -> Any:
    """kind: Integral or Real. A file's array has one kind throughout."""
    value = _get(metadata, key, default)
    if not _is_array(value) or not all(isinstance(each, kind) for each in value[:1]):
        raise _unfit(key, value, f"an array of {'integers' if kind is Integral else 'numbers'}")
    return value


def _is_array(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def _unfit(key: str, value: Any, expected: str) -> TokenizerError:
    shown = "another array" if _is_array(value) else f"{value!r:.40}"
    return TokenizerError(f"tokenizer.ggml.{key} is {shown}; expected {expected}")


def _flag(metadata: Mapping[str, Any], key: str) -> bool | None:
    value = _get(metadata, key, None)
    return None if value is None else bool(value)


def _role(metadata: Mapping[str, Any], role: str, size: int) -> int | None:
    """The id with a role. Absent stays None: other engines guess 11 for bos and eos of BPE."""
    value = _get(metadata, f"{role}_token_id", None)
    if value is None:
        return None
    if not isinstance(value, Integral):
        raise TokenizerError(f"tokenizer.ggml.{role}_token_id is {value!r}; expected an integer")
    if not 0 <= int(value) < size:
        # Files with -1 or 2^32 - 1 for "none" exist.
        log.warning("ignored tokenizer.ggml.%s_token_id %s: not below %d", role, value, size)
        return None
    return int(value)


def _end_ids(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> frozenset[int]:
    roles = (_role(metadata, role, len(tokens)) for role in _END_ROLES)
    named = {
        i
        for i, text in enumerate(tokens)
        # Gemma's user-defined "</s>" closes struck-out HTML and ends nothing.
        if text in _END_TEXTS and (text != "</s>" or kinds[i] != USER_DEFINED)
    }
    return frozenset(named | {i for i in roles if i is not None})


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for i, merge in enumerate(merges):
        # Index 0 may itself be a space that belongs to the left part.
        cut = merge.find(" ", 1)
        if cut < 0 or cut + 1 == len(merge):
            raise TokenizerError(
                f"tokenizer.ggml.merges[{i}] is {merge!r}; expected two parts and a space between"
            )
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _check_length(key: str, found: int, expected: int) -> None:
    if found != expected:
        raise TokenizerError(
            f"tokenizer.ggml.{key} has {found} entries, tokenizer.ggml.tokens has {expected}"
        )
