"""Texts and the tokens that BERT's own tokenizer makes of them.

The tokens are those of Hugging Face's tokenizers 0.23.3 with the tokenizer.json of all-MiniLM-L6-v2, which has the
vocabulary of bert-base-uncased. With the small vocabulary of `vocabulary()` that library makes the same ones.
"""

from typing import Any

import numpy as np

TEXTS: tuple[tuple[str, str], ...] = (
    ("오늘 날씨가 매우 좋습니다", "ᄋ ##ᅩ ##ᄂ ##ᅳ ##ᆯ ᄂ ##ᅡ ##ᆯ ##ᄊ ##ᅵ ##ᄀ ##ᅡ ᄆ ##ᅢ ##ᄋ ##ᅮ [UNK]"),
    ("भ\u093eरत एक व\u093fश\u093eल द\u0947श ह\u0948", "भ ##\u093e ##र ##त ए ##क व ##\u093f ##श ##\u093e ##ल द ##श ह"),
    (
        "আম\u09bf ব\u09be\u0982ল\u09beয\u09bc গ\u09beন গ\u09beই",
        "আ ##ম ##\u09bf ব ##\u09be ##\u0982 ##ল ##\u09be ##য গ ##\u09be ##ন গ ##\u09be ##ই",
    ),
    ("தம\u0bbfழ\u0bcd ந\u0bbeட\u0bc1", "[UNK] ந ##\u0bbe ##ட ##\u0bc1"),
    ("ไทย", "[UNK]"),
    ("الع\u064eر\u064eب\u0650ي\u064e\u0651ة", "ا ##ل ##ع ##ر ##ب ##ي ##ة"),
    ("ע\u05b4ב\u05b0ר\u05b4ית", "ע ##ב ##ר ##י ##ת"),
    ("Tiếng Việt Café naïve e\u0301", "tie ##ng viet cafe naive e"),
    ("中文混合text日本のカタカナ", "中 文 [UNK] 合 text 日 本 の ##カ ##タ ##カ ##ナ"),
    ("豈𠀀x", "[UNK] [UNK] x"),
    ("a" * 100 + " a", "aaa" + " ##aa" * 48 + " ##a a"),
    ("a" * 101 + " a", "[UNK] a"),
    ("1\ufe0f\u20e3 \xa9\ufe0f", "[UNK] \xa9"),
    ("to\x85be", "to ##be"),
    ("a\x00b\ufffdc\u200bd\ufeff", "abc ##d"),
    ("x\u2028y\u3000z\xa0a\t\r\nb", "x y z a b"),
    ("ΌΣΟΣ ΑΣ", "ο ##σ ##ο ##σ α ##σ"),
    ("İI ß", "ii ß"),
    ("\u2260 \u037e \u1fef", "= ; `"),
    ("Don't stop!(ok)~$5", "don ' t stop ! ( ok ) ~ $ 5"),
    ("can\u2019t \u201cso\u201d \u2014 \u2026", "can \u2019 t \u201c so \u201d \u2014 \u2026"),
    ("[SE P] ##a", "[ se p ] # # a"),
    ("\u2581the a\u2581the", "[UNK] [UNK]"),
    ("e = mc\xb2", "e = mc ##\xb2"),
    ("ﬁ \xbd Ａ", "ﬁ \xbd [UNK]"),
    ("ő\u0327\u0301", "o"),
    (" \t", ""),
    ("", ""),
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PIECES = tuple(
    dict.fromkeys([*SPECIAL, "the", "##the", "##b", "##c", *(piece for _, row in TEXTS for piece in row.split())])
)


def vocabulary(pieces: tuple[str, ...] = PIECES) -> dict[str, Any]:
    """Return the metadata of a GGUF whose vocabulary is these pieces, the special ones first."""
    tokens = [
        piece if piece in SPECIAL else piece[2:] if piece.startswith("##") and len(piece) > 2 else "\u2581" + piece
        for piece in pieces
    ]
    roles = {"bos": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]", "mask": "[MASK]"}
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if piece in SPECIAL else 1 for piece in pieces], np.int32),
        **{f"tokenizer.ggml.{role}_token_id": pieces.index(token) for role, token in roles.items()},
    }
