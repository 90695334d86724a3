"""Find llama.cpp's name (`tokenizer.ggml.pre`) for the pre-tokenizer that a tokenizer.json describes.

GGUF has names where tokenizer.json has regular expressions. Expressions are compared as written, and one that is not
known here is refused: one that is merely similar would give other tokens.
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

# By the steps before the bytes: regular expressions, "digits" for one piece per digit, "words" for GPT-2's rule.
_NAMES: dict[tuple[str, ...], str] = {
    ("words",): "gpt-2",
    ("digits", "words"): "smollm",
    (f"{_CONTRACTION}|{_WORD}|\\p{{N}}{{1,3}}|{_OTHERS}|{_SPACES}",): "llama-bpe",
    (f"{_CONTRACTION}|{_WORD}|\\p{{N}}|{_OTHERS}|{_SPACES}",): "qwen2",
    (f"{_CASED.replace('TAIL', '')}|\\p{{N}}|{_CASED_OTHERS}|{_SPACES}",): "tekken",
    (f"{_CASED.replace('TAIL', _CONTRACTION + '?')}|\\p{{N}}{{1,3}}|{_CASED_OTHERS}|{_SPACES}",): "gpt-4o",
}
assert set(_NAMES.values()) <= NAMES, "our own tokenizer does not know one of these names"


def pre_tokenizer_name(pre_tokenizer: Any) -> str | None:
    """Return llama.cpp's name for the entry "pre_tokenizer" of a byte-level tokenizer.json; None for an unknown one.

    >>> pre_tokenizer_name({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True})
    'gpt-2'
    """
    found: list[str] = []
    for step in steps(pre_tokenizer, "pretokenizers") or [{}]:
        found += _step(step)
    return _NAMES.get(tuple(found))


def _step(entry: dict[str, Any]) -> list[str]:
    """Return a step as in the keys of _NAMES: nothing for bytes alone, "?" for an unknown step."""
    kind = entry.get("type")
    if kind == "ByteLevel" and not entry.get("add_prefix_space"):
        return ["words"] if entry.get("use_regex", True) else []
    if kind == "Digits" and entry.get("individual_digits") is True:
        return ["digits"]
    return [_split(entry) if kind == "Split" else "?"]


def _split(entry: dict[str, Any]) -> str:
    """Return the regular expression of a step that cuts a text around its matches; "?" for any other step."""
    pattern = entry.get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    plain = entry.get("behavior") == "Isolated" and not entry.get("invert")
    return expression if plain and isinstance(expression, str) else "?"
