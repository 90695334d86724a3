"""SentencePiece vocabularies that a tokenizer.json expresses as BPE with byte fallback (Llama 2, Gemma).

SentencePiece merges two neighbours that together are a token, the pair with the best score first. BPE merges the pairs
of a list, the first of the list first. Both give the same tokens if the list has every such pair and the pairs of one
token follow each other: the position of a token's pairs is then its score. Kudo and Richardson 2018, arXiv:1808.06226.
"""

import re

import numpy as np
from numpy.typing import NDArray

from edgedec_export.gguf_writer import Entry, boolean, text
from edgedec_export.hf.vocabulary import BYTE, NORMAL, SPACE, USER_DEFINED, TokenizerFiles, Tokens, steps

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_NO_SCORE = -1e9  # of tokens that no merge produces: SentencePiece would merge them last


def sentencepiece_entries(files: TokenizerFiles, tokens: Tokens) -> list[Entry]:
    """Return the entries that the vocabulary has beside its tokens; set the scores and the kinds of byte tokens.

    Raises:
        ModelFormatError: The file contradicts itself.
        UnsupportedModelError: The vocabulary is no SentencePiece model, or has rules that llama.cpp does not.
    """
    space_first = _space_first(files)
    n_bytes = 0
    for number, (token, kind) in enumerate(zip(tokens.texts, tokens.kinds, strict=True)):
        if kind == NORMAL and _BYTE.fullmatch(token):
            tokens.kinds[number] = BYTE
            n_bytes += 1
        elif kind == USER_DEFINED:
            tokens.texts[number] = token.replace(SPACE, " ")
    if n_bytes != 256:
        files.refuse(f"its vocabulary has {n_bytes} tokens for single bytes, expected 256")
    tokens.scores = _scores(files, tokens)
    return [
        ("tokenizer.ggml.model", text("llama")),
        ("tokenizer.ggml.pre", text("default")),
        ("tokenizer.ggml.add_space_prefix", boolean(space_first)),
    ]


def _scores(files: TokenizerFiles, tokens: Tokens) -> NDArray[np.float32]:
    """Return float32[n_vocab]: minus the position of a token among those that merges produce."""
    normal = {t: i for i, (t, kind) in enumerate(zip(tokens.texts, tokens.kinds, strict=True)) if kind == NORMAL}
    scores = np.full(len(tokens.texts), _NO_SCORE, np.float32)
    last, place = "", 0
    merges = files.merges()
    pairs = {pair for pair in merges if pair[0] in normal and pair[1] in normal}
    for left, right in merges:
        whole = left + right
        if (left, right) not in pairs or whole not in normal:
            continue  # a part or the whole is cut out of texts before any merge
        if whole != last:
            if scores[normal[whole]] != _NO_SCORE:
                files.refuse(f"its merges to {whole[:40]!r} do not follow each other, as SentencePiece requires")
            scores[normal[whole]] = -place
            last, place = whole, place + 1
    for token in normal:
        for i in range(1, len(token)):
            if (token[:i], token[i:]) not in pairs and token[:i] in normal and token[i:] in normal:
                files.refuse(
                    f"it has no merge of {token[:i][:40]!r} and {token[i:][:40]!r}, which SentencePiece would join"
                )
    return scores


def _space_first(files: TokenizerFiles) -> bool:
    """Tell whether a space is put before a text, by the steps that come before the merges."""
    found = steps(files.json.get("normalizer"), "normalizers")
    found += steps(files.json.get("pre_tokenizer"), "pretokenizers")
    first = False
    replaced = False
    for step in found:
        kind = step.get("type")
        if kind == "Prepend" and step.get("prepend") == SPACE and not replaced:
            first = True
        elif kind == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == SPACE:
            replaced = True
        elif kind == "Metaspace" and step.get("replacement") == SPACE and step.get("split") is False and not replaced:
            replaced, first = True, step.get("prepend_scheme") == "always"
            if step.get("prepend_scheme") not in ("always", "never"):
                files.refuse(f"it puts a space before texts by the scheme {str(step.get('prepend_scheme'))[:40]!r}")
        elif not (kind == "Split" and step.get("pattern") == {"String": " "} and replaced):  # no space left to split at
            files.refuse(f"it has the step {str(step)[:200]}")
    if not replaced:
        files.refuse(f"spaces do not become {SPACE!r}")
    return first
