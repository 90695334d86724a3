"""Convert a checkpoint's tokenizer.json to the vocabulary of a GGUF.

Two kinds are converted: byte-level BPE (llama.cpp's "gpt2"), and BPE over characters with byte fallback, in which
Hugging Face expresses SentencePiece models ("llama"). A rule that llama.cpp does not have is refused
by name, with one exception: normalization to NFC, which llama.cpp leaves out for every model that has it.

GGUF has names where tokenizer.json has regular expressions. Expressions are compared as written, and one that is not
known here is refused: one that is merely similar would give other tokens.

SentencePiece merges two neighbours that together are a token, the pair with the best score first. BPE merges the pairs
of a list, the first of the list first. Both give the same tokens if the list has every such pair and the pairs of one
token follow each other: the position of a token's pairs is then its score. Kudo and Richardson 2018, arXiv:1808.06226.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError
from edgedec_export.gguf_writer import Metadata
from edgedec_export.hf.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNUSED,
    USER_DEFINED,
    TokenizerFiles,
    Tokens,
    steps,
)
from edgedec_runtimes.tokenizer.pretokenizers import NAMES, pre_tokenizer

_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
# llama.cpp's converter takes tokens of this form for control tokens, whatever tokenizer.json says.
_CONTROL_TEXT = re.compile(r"<\|.*\|>|<｜.*｜>|<unused\d+>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)


def tokenizer_entries(folder: Path, n_vocab: int, ids: Mapping[str, int]) -> Metadata:
    """Return the metadata entries of a vocabulary.

    Args:
        n_vocab: Rows of the embedding matrix; unused tokens are appended, or added tokens left out, to match it.
        ids: Token ids of "bos" and "eos", used where tokenizer_config.json names none.

    Raises:
        ModelNotFoundError: There is no tokenizer.json.
        ModelFormatError: A file is damaged.
        UnsupportedModelError: llama.cpp does not have one of its rules.
        StorageError: A file cannot be read.
    """
    files = TokenizerFiles(folder)
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if files.model.get(key):
            files.refuse(f"its model has {key} {str(files.model[key])[:40]!r}")
    tokens = _tokens(files, n_vocab)
    if files.model.get("byte_fallback") is True:
        entries = sentencepiece_entries(files, tokens)
    else:
        entries = _byte_level_entries(files)
    encoded = _encoded(files, tokens.texts)
    entries |= {"tokenizer.ggml.tokens": encoded, "tokenizer.ggml.token_type": np.array(tokens.kinds, np.int32)}
    if tokens.scores is not None:
        entries["tokenizer.ggml.scores"] = tokens.scores
    return entries | _role_entries(files, tokens, ids) | _template(files, folder)


def _tokens(files: TokenizerFiles, n_vocab: int) -> Tokens:
    """Return the tokens by id; ids without a token get one that is never used."""
    by_number: dict[int, tuple[str, int]] = {number: (token, NORMAL) for token, number in files.vocab.items()}
    if len(by_number) != len(files.vocab):
        files.fail("two tokens have the same id")
    added = files.json.get("added_tokens") or []
    for entry in added if isinstance(added, list) else files.fail("its added_tokens are no list"):
        number, content = _added(files, entry)
        if by_number.get(number, (content,))[0] != content or files.vocab.get(content, number) != number:
            files.fail(f"token {number} occurs twice, once as {content[:40]!r}")
        control = entry.get("special") is True or _CONTROL_TEXT.fullmatch(content)
        by_number[number] = (content, CONTROL if control else USER_DEFINED)  # an id beyond n_vocab is left out below
    beyond = [i for i, (_, kind) in by_number.items() if i >= n_vocab and kind == NORMAL]
    if beyond:
        files.fail(f"token {beyond[0]} has no row among the {n_vocab} of the embedding matrix")
    listed = [by_number.get(number) or (f"[PAD{number}]", UNUSED) for number in range(n_vocab)]
    if len({token for token, _ in listed}) < n_vocab:
        files.fail("two ids have the same token")
    return Tokens([token for token, _ in listed], [kind for _, kind in listed])


def _added(files: TokenizerFiles, entry: Any) -> tuple[int, str]:
    """Return id and text of an added token, after checking that llama.cpp finds it in texts the same way."""
    if not isinstance(entry, dict) or type(entry.get("id")) is not int or not isinstance(entry.get("content"), str):
        files.fail(f"the added token {str(entry)[:80]} has no id and content")
    if entry["id"] < 0 or not entry["content"]:
        files.fail(f"the added token {str(entry)[:80]} has a negative id, or no text")
    for key in ("lstrip", "rstrip", "single_word"):
        if entry.get(key):
            files.refuse(f"token {entry['content'][:40]!r} has {key}, which llama.cpp does not support")
    return entry["id"], entry["content"]


def _byte_level_entries(files: TokenizerFiles) -> Metadata:
    """Return the entries that a byte-level BPE vocabulary has beside its tokens."""
    normalizers = [str(step.get("type"))[:40] for step in steps(files.json.get("normalizer"), "normalizers")]
    if normalizers not in ([], ["NFC"]):
        files.refuse(f"its normalizer is {normalizers}")
    name = pre_tokenizer_name(files.json.get("pre_tokenizer"))
    if name is None:
        files.refuse(f"its pre_tokenizer is unknown: {str(files.json.get('pre_tokenizer'))[:300]}")
    ignore_merges = files.model.get("ignore_merges") is True
    if ignore_merges != pre_tokenizer(name).ignore_merges:
        files.refuse(
            f"its ignore_merges is {ignore_merges}, which llama.cpp does not do with the pre-tokenizer {name!r}"
        )
    merges = files.merges()
    for left, right in merges:
        if " " in left + right:
            files.refuse(f"the merge of {left[:40]!r} and {right[:40]!r} has a space in it")
    pairs = _encoded(files, [f"{left} {right}" for left, right in merges])
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.merges": pairs}


def _role_entries(files: TokenizerFiles, tokens: Tokens, ids: Mapping[str, int]) -> Metadata:
    """Return which tokens have a role, and which of these are put around every text."""
    number_of = {token: number for number, token in enumerate(tokens.texts)}
    roles = {role: i for role, i in ids.items() if i < len(tokens.texts)}
    for role in _ROLES:
        role_token = files.config.get(f"{role}_token")
        role_token = role_token.get("content") if isinstance(role_token, dict) else role_token
        if isinstance(role_token, str) and role_token in number_of:
            roles[role] = number_of[role_token]
    entries: Metadata = {f"tokenizer.ggml.{_ROLES[role]}_token_id": i for role, i in roles.items()}
    around = _around(files)
    for role in ("bos", "eos"):
        setting = files.config.get(f"add_{role}_token")
        if not isinstance(setting, bool) and around is None:
            continue  # llama.cpp then uses the default of the pre-tokenizer
        put = setting if isinstance(setting, bool) else role in (around or {})
        if put and role not in roles:
            files.fail(f"it adds the {role} token to texts, but names no such token")
        if put and around is not None and role in around and tokens.texts[roles[role]] != around[role]:
            files.refuse(f"it puts {around[role][:40]!r} around texts, which is not the {role} token")
        entries[f"tokenizer.ggml.add_{role}_token"] = put
    return entries


def _around(files: TokenizerFiles) -> dict[str, str] | None:
    """Return what the post-processor puts before ("bos") and after ("eos") a text; None where it has no template."""
    around: dict[str, str] | None = None
    for part in steps(files.json.get("post_processor"), "processors"):
        kind = part.get("type")
        if kind == "TemplateProcessing" and around is None:
            around = _template_ends(files, part.get("single"))
        elif kind != "ByteLevel":
            files.refuse(f"its post_processor has the step {str(kind)[:40]!r}")
    return around


def _template_ends(files: TokenizerFiles, single: Any) -> dict[str, str]:
    """Return the special tokens of a template such as <s> A, at most one on each side of the text A."""
    try:
        steps = [("A", "") if "Sequence" in step else ("", step["SpecialToken"]["id"]) for step in single]
        names = [name for name, _ in steps]
        at = names.index("A")
        before, after = [token for _, token in steps[:at]], [token for _, token in steps[at + 1 :]]
    except (KeyError, TypeError, ValueError):
        files.fail("the template of its post_processor is no list of tokens around a text")
    if not all(isinstance(token, str) for token in before + after):
        files.fail("the template of its post_processor has a token without a name")
    if len(before) > 1 or len(after) > 1 or names.count("A") != 1:
        files.refuse("its post_processor puts more than one token before or after a text")
    return dict(zip(["bos"], before, strict=False)) | dict(zip(["eos"], after, strict=False))


def _template(files: TokenizerFiles, folder: Path) -> Metadata:
    """Return the chat template, if there is one: from its own file, else from tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    template: Any = files.config.get("chat_template")
    if file.is_file():
        try:
            template = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFormatError(f"{file}: it cannot be read as UTF-8 ({error}); download it again") from error
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return {"tokenizer.chat_template": template} if isinstance(template, str) else {}


def _encoded(files: TokenizerFiles, strings: list[str]) -> list[bytes]:
    try:
        return [string.encode() for string in strings]
    except UnicodeEncodeError:
        files.fail("a token is not valid Unicode")


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
    names: list[str] = []
    for step in steps(pre_tokenizer, "pretokenizers") or [{}]:
        names += _step(step)
    return _NAMES.get(tuple(names))


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


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_NO_SCORE = -1e9  # of tokens that no merge produces: SentencePiece would merge them last


def sentencepiece_entries(files: TokenizerFiles, tokens: Tokens) -> Metadata:
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
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": space_first,
    }


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
    normalizers = steps(files.json.get("normalizer"), "normalizers")
    normalizers += steps(files.json.get("pre_tokenizer"), "pretokenizers")
    first = False
    replaced = False
    for step in normalizers:
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
