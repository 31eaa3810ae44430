"""Fill in the middle: texts around a gap as the prompt of a model that was taught to fill it.

Files do not say whether a model was: it is, if its vocabulary has the markers of a family. It knows
neither HTTP nor how an answer is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from voltapile.gateway.tokenizer import Tokenizer

THIS, PROJECT = "filename\n", "project\n"  # no client tells their names
LONGEST = 16  # characters of most tokens


class Marks(NamedTuple):
    """Before the text in front of the gap, before the text behind it, and before the answer; of a
    project and of each of its files, "" where a family knows of none."""

    prefix: str
    suffix: str
    middle: str
    project: str = ""
    file: str = ""


FAMILIES = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


class Other(NamedTuple):
    """Another file of the project, or a piece of one."""

    name: str
    text: str


class Filler:
    """Prompts for one model that fills gaps."""

    def __init__(self, tokenizer: Tokenizer, marks: Marks) -> None:
        self._tokenizer = tokenizer
        found = [_marker(tokenizer, mark) if mark else [] for mark in marks]
        self._prefix, self._suffix, self._middle, self._project, self._file = found

    @property
    def ends(self) -> list[int]:
        """Markers that a model writes behind what it has filled in."""
        return self._prefix + self._suffix + self._middle + self._project + self._file

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Filler | None:
        """None: its vocabulary has no markers for it."""
        for marks in FAMILIES:
            if all(len(_marker(tokenizer, mark)) == 1 for mark in marks if mark):
                return cls(tokenizer, marks)
        return None

    def ids(self, text: str) -> list[int]:
        """What looks like a marker in somebody's file is none."""
        return self._tokenizer.encode(text, add_special=False, parse_special=False) if text else []

    def prompt(
        self,
        before: list[int],
        behind: list[int],
        begun: Sequence[int] = (),
        others: Sequence[Other] = (),
        most: int = 0,
    ) -> list[int]:
        """others: the last come closest. begun: the answer's first words. most: tokens in all,
        to which the others are cut from their beginning."""
        ids = [*self._prefix, *before, *self._suffix, *behind, *self._middle, *begun]
        bos = self._tokenizer.bos_id
        start = [bos] if self._tokenizer.add_bos and bos is not None else []
        room = most - len(start) - len(ids)
        return start + (self._of_others(others, room) if others and room > 0 else []) + ids

    def _of_others(self, others: Sequence[Other], room: int) -> list[int]:
        """The last ones first, so that those for which there is no room are not even read."""
        ids = self._file + self.ids(THIS) if self._file else []
        for other in reversed(others):
            if len(ids) >= room:
                break
            told = f"{other.name}\n{other.text}\n" if self._file else f"{other.text}\n\n"
            ids = self._file + self.ids(told[-LONGEST * room :]) + ids
        else:
            ids = (self._project + self.ids(PROJECT) if self._project else []) + ids
        return ids[-room:]


def _marker(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False)
