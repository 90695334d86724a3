"""Which of llama.cpp's pre-tokenizers cuts texts as a tokenizer.json says: the name for `tokenizer.ggml.pre`.

GGUF has names where tokenizer.json has regular expressions. They are compared as written; one that is not known here
is refused, as one that is nearly the same would give other tokens.
"""

from typing import Any

from edgedec_export.hf.vocabulary import steps
from edgedec_runtimes.tokenizer.pretokenizers import NAMES

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+TAIL|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*TAIL"
_CASED_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

# The steps before the bytes: regular expressions that cut, "digits" for one piece a digit, "words" for GPT-2's rule.
_NAMES: dict[tuple[str, ...], str] = {
    ("words",): "gpt-2",
    ("digits", "words"): "smollm",
    (f"{_CONTRACTION}|{_WORD}|\\p{{N}}{{1,3}}|{_OTHERS}|{_SPACES}",): "llama-bpe",
    (f"{_CONTRACTION}|{_WORD}|\\p{{N}}|{_OTHERS}|{_SPACES}",): "qwen2",
    (f"{_CASED.replace('TAIL', '')}|\\p{{N}}|{_CASED_OTHERS}|{_SPACES}",): "tekken",
    (f"{_CASED.replace('TAIL', _CONTRACTION + '?')}|\\p{{N}}{{1,3}}|{_CASED_OTHERS}|{_SPACES}",): "gpt-4o",
}
assert set(_NAMES.values()) <= NAMES, "names that our own tokenizer does not cover"


def pre_tokenizer_name(pre_tokenizer: Any) -> str | None:
    """Return llama.cpp's name for the entry "pre_tokenizer" of a byte-level tokenizer.json, None for an unknown one.

    >>> pre_tokenizer_name({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True})
    'gpt-2'
    """
    found: list[str] = []
    for step in steps(pre_tokenizer, "pretokenizers") or [{}]:
        found += _step(step)
    return _NAMES.get(tuple(found))


def _step(entry: dict[str, Any]) -> list[str]:
    """Return a step as _NAMES has it: none for the bytes alone, "?" for what is not known."""
    kind = entry.get("type")
    if kind == "ByteLevel" and not entry.get("add_prefix_space"):
        return ["words"] if entry.get("use_regex", True) else []
    if kind == "Digits" and entry.get("individual_digits") is True:
        return ["digits"]
    return [_split(entry) if kind == "Split" else "?"]


def _split(entry: dict[str, Any]) -> str:
    """Return the expression of a step that cuts around what matches."""
    pattern = entry.get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    plain = entry.get("behavior") == "Isolated" and not entry.get("invert")
    return expression if plain and isinstance(expression, str) else "?"
