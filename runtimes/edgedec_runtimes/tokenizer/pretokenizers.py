"""How a text is cut into words before byte-pair encoding: the regular expressions behind `tokenizer.ggml.pre`.

A pre-tokenizer has stages. A stage cuts a piece of text into its matches and the stretches between them; the next stage
cuts each of these as if nothing were around it. Expressions in bytes are applied to `collapse`d text, others to text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from edgedec_runtimes.tokenizer.unicode_classes import LETTER, MARK, NUMBER, PUNCTUATION, SYMBOL, collapse

Stage = re.Pattern[bytes] | re.Pattern[str]

# The members of \p{L} and its like, to stand between brackets in an expression for collapsed text.
_CLASSES = {
    "L": f"A-Za-z\\x{LETTER:x}",
    "N": f"0-9\\x{NUMBER:x}",
    "P": f"!-#%-*,-/:;?@\\[-\\]_{{}}\\x{PUNCTUATION:x}",
    "S": f"$+<=>^`|~\\x{SYMBOL:x}",
    "M": f"\\x{MARK:x}",
    "upper": f"A-Z\\x{LETTER:x}",  # llama.cpp takes letters beyond ASCII for both
    "lower": f"a-z\\x{LETTER:x}",
}
_CONTRACTION = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LINES = r"[\r\n]"
_NUMBER = "[<N>]"
_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?[<L>]+| ?[<N>]+| ?[^\s<L><N>]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n<L><N>]?[<L>]+"
_OTHERS = r" ?[^\s<L><N>]+[\r\n]*"
_CASED_WORDS = (
    r"[^\r\n<L><N>]?[<upper>]*[<lower>]+{tail}|[^\r\n<L><N>]?[<upper>]+[<lower>]*{tail}"
    r"|[<N>]{digits}| ?[^\s<L><N>]+[\r\n/]*|" + _SPACES
)
_DEEPSEEK3 = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n<L><P><S>]?[<L><M>]+| ?[<P><S>]+[\r\n]*|" + _SPACES
# U+0800 to U+9FA5 without white space.
_IDEOGRAPHS = (
    "[\u0800-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u2fff\u3001-\u9fa5\uac00-\ud7ff]+"
)
_IDEOGRAPHS_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"


def _words_and(numbers: str, *, contraction: str = _CONTRACTION, word: str = _WORD, others: str = _OTHERS) -> str:
    return "|".join(filter(None, (contraction, word, numbers, others, _SPACES)))


_STAGES: dict[str, tuple[str, ...]] = {
    "default": (r"[<P>$+<=>^~|]+", _GPT2, "[<N>]+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (_NUMBER, _GPT2),
    "falcon": (r"[<P>$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "llama3": (_words_and("[<N>]{1,3}"),),
    "qwen2": (_words_and(_NUMBER),),
    "qwen35": (_words_and(_NUMBER, word=r"[^\r\n<L><N>]?[<L><M>]+", others=r" ?[^\s<L><M><N>]+[\r\n]*"),),
    "ufakzeka": (_words_and(_NUMBER, contraction=""),),
    "minicpm5": ("[<N>]{1,3}", _words_and("[<N>]+")),
    "seed-coder": (_words_and(_NUMBER, others=r" ?[^\s<L><N>\r\n]+"),),
    "bailingmoe": ("|".join((_CONTRACTION, _WORD, _NUMBER, _OTHERS, r"\s*[\r\n]|\s+(?!\S)|\s+")),),
    "tekken": (_CASED_WORDS.replace("{tail}", "").replace("{digits}", ""),),
    "gpt-4o": (_CASED_WORDS.replace("{tail}", f"(?:{_CONTRACTION})?").replace("{digits}", "{1,3}"),),
    "deepseek-coder": (_LINES, r"\s?[<L>]+", r"\s?[<P>]+", _IDEOGRAPHS, _NUMBER),
    "deepseek-v3": ("[<N>]{1,3}", _IDEOGRAPHS_AND_KANA, _DEEPSEEK3),
}

# The values of `tokenizer.ggml.pre` by the entry of _STAGES that they stand for.
_SAME_CUTS = {
    "default": ("", "default"),
    "gpt-2": tuple("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling".split()),
    "smollm": ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    "falcon": ("falcon",),
    "llama3": tuple(
        """
        llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4 glm5
        """.split()
    ),
    "qwen2": tuple("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2".split()),
    "qwen35": ("qwen35",),
    "ufakzeka": ("ufakzeka",),
    "minicpm5": ("minicpm5",),
    "seed-coder": ("seed-coder",),
    "bailingmoe": ("bailingmoe", "bailingmoe2", "llada-moe"),
    "tekken": ("tekken",),
    "gpt-4o": ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    "deepseek-coder": ("deepseek-coder",),
    "deepseek-v3": ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
}
_LLAMA3 = frozenset(_SAME_CUTS["llama3"]) - {"dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"}
_IGNORE_MERGES = _LLAMA3 | {"glm4", "glm5", "minicpm5", "tekken"}
_ADD_BOS = _LLAMA3 | {"tekken"}
_NO_BOS = frozenset({"chatglm-bpe", "glm4", "glm5"})
_CUTS = {name: cuts for cuts, names in _SAME_CUTS.items() for name in names}

DIFFERENT_CUTS = frozenset(_STAGES)
"""One name for each different way to cut."""

NAMES = frozenset(_CUTS)
"""The values of `tokenizer.ggml.pre` that are covered; "" stands for an absent key."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is cut into words, and what else llama.cpp decides by the same name.

    Attributes:
        stages: The regular expressions, which are applied one after another.
        ignore_merges: A word that is a token becomes that token, whatever the merges would make of it.
        add_bos: Whether texts begin with BOS where the metadata does not say.
        has_bos: Whether BOS is token 11 where the metadata names none.
    """

    stages: tuple[Stage, ...]
    ignore_merges: bool
    add_bos: bool
    has_bos: bool

    def split(self, text: str) -> Iterator[str]:
        """Yield the words of a text, which joined are the text; each is found only when it is needed."""
        collapsed = collapse(text)
        spans = iter([(0, len(text))] if text else [])
        for stage in self.stages:
            spans = _cut(stage, text, collapsed, spans)
        for start, end in spans:
            yield text[start:end]


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer for a name in NAMES."""
    stages = tuple(_compile(stage) for stage in _STAGES[_CUTS[name]])
    return PreTokenizer(stages, name in _IGNORE_MERGES, name in _ADD_BOS, name not in _NO_BOS)


def _compile(expression: str) -> Stage:
    if not expression.isascii():
        return re.compile(expression)
    for name, members in _CLASSES.items():
        expression = expression.replace(f"<{name}>", members)
    return re.compile(expression.encode("ascii"))


def _cut(stage: Stage, text: str, collapsed: bytes, spans: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of spans after each was cut at the borders of a stage's matches."""
    for start, end in spans:
        matches = (
            stage.finditer(collapsed, start, end)
            if isinstance(stage.pattern, bytes)
            else stage.finditer(text, start, end)
        )
        last = start
        for match in matches:
            first, last_end = match.span()
            if first > last:
                yield last, first
            yield first, last_end
            last = last_end
        if last < end:
            yield last, end
