"""How byte-level BPE vocabularies cut text into words before any merge: `tokenizer.ggml.pre`.

Each name stands for a list of regular expressions, applied one after another: what a pattern
matches becomes a piece, and so does every gap between matches. Where Hugging Face's tokenizer and
llama.cpp differ (NFC, case folding in contractions), Hugging Face's way is taken, because the
models were trained with it. This file knows nothing of vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Runs of letters that begin a new piece at a capital ("camelCase"), used by o200k and tekken.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_CASED_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


@dataclass(frozen=True)
class PreTokenizer:
    """One way of cutting, with what the same family of vocabularies does besides."""

    patterns: tuple[str, ...]
    nfc: bool = False  # Unicode normalisation form C first (outside special tokens)
    ignore_merges: bool = False  # a piece that is a token stays whole, whatever the merges say
    add_bos: bool = False  # where the file does not say


_LLAMA3 = PreTokenizer(
    (rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}",), ignore_merges=True, add_bos=True
)
_QWEN2 = PreTokenizer((rf"{_WORDS}|\p{{N}}|{_SYMBOLS}|{_SPACES}",), nfc=True)
_QWEN35 = PreTokenizer(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    nfc=True,
)
_SMOLLM = PreTokenizer((r"\p{N}", _GPT2))
_GPT_2 = PreTokenizer((_GPT2,))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_DEEPSEEK_V3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_DEEPSEEK_CODER = PreTokenizer(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
)
_GPT_4O = PreTokenizer(
    (
        "|".join(f"{run}{_CONTRACTIONS}?" for run in _CASED)
        + rf"|\p{{N}}{{1,3}}|{_CASED_SYMBOLS}|{_SPACES}",
    )
)
_TEKKEN = PreTokenizer(
    (f"{'|'.join(_CASED)}|\\p{{N}}|{_CASED_SYMBOLS}|{_SPACES}",), ignore_merges=True
)

_GROUPS: tuple[tuple[PreTokenizer, str], ...] = (
    (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2"),
    (_QWEN2, "qwen2 deepseek-r1-qwen stablelm2 kormo f2llmv2 hunyuan"),
    (_QWEN35, "qwen35"),
    (_SMOLLM, "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    (_GPT_2, "gpt-2 phi-2 mpt olmo jais trillion mellum modern-bert gigachat"),
    (_DEFAULT, "default"),
    (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense joyai-llm"),
    (_DEEPSEEK_CODER, "deepseek-coder"),
    (_GPT_4O, "gpt-4o llama4"),
    (_TEKKEN, "tekken"),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: pre for pre, names in _GROUPS for name in names.split()
}
