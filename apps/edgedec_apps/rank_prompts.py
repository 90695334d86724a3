"""What a model reads to rank a document: a pair of texts for an encoder, a question for a model that writes texts.

No text of a user is read as a control token, and none stands for a place in a template.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from edgedec.api.engine import Engine
from edgedec.chat import thinking_variables
from edgedec.control_tokens import encode_with_controls
from edgedec.decoding.prompt_length import CUT_DOCUMENT, about_tokens, require_may_fit, too_long
from edgedec.errors import CapabilityError, ModelFormatError, PromptTooLongError, RequestError
from edgedec.gguf.file import GGUF
from edgedec.gguf.metadata import get_bool, get_text
from edgedec.tokenizer import Tokenizer, added_around

Form = Callable[[str, int | None], tuple[int, ...]]
"""`(document, cut)` -> the tokens to read. The document is cut to `cut` tokens and to what fits; None for no cut.

Raises PromptTooLongError where that does not fit.
"""

QUERY, DOCUMENT = "{query}", "{document}"
_PLACES = re.compile(r"(\{query\}|\{document\})")
TEMPLATE = "tokenizer.chat_template.rerank"
# The question that Qwen3-Reranker was trained with (Zhang et al. 2025, arXiv:2506.05176).
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_USER = (
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    f"<Query>: {QUERY}\n<Document>: {DOCUMENT}"
)
_MOST_PLACES, _MOST_CHARACTERS = 8, 20_000
_DOUBLED = frozenset({"jina-v1-en", "jina-v2-code", "roberta-bpe"})  # pre-tokenizers of RoBERTa's family

_Part = str | tuple[int, ...]


class QueryTooLongError(PromptTooLongError):
    """A query fills the context, so that no document fits beside it."""


def pair_form(tokenizer: Tokenizer, gguf: GGUF, query: str, n_most: int, n_trained: int = 0) -> tuple[Form, int]:
    """Return the form of an encoder, and how many tokens stand before the document.

    Both texts stand between the tokens that the model has around a text.

    Args:
        gguf: Its header, which says whether there are two tokens between the texts, as RoBERTa has them.
        query: The first text.
        n_most: Most tokens of both.
        n_trained: Tokens of the context that the model was trained for; 0 where that is not known.

    Raises:
        PromptTooLongError: The query alone is too long.
    """
    begin, end = added_around(tokenizer)
    between = 2 * end if _doubles(gguf) else end
    room = n_most - len(begin) - len(between) - len(end)
    is_long = tokenizer.least_tokens(query) >= room
    ids = [] if is_long else tokenizer.encode(query, add_special=False, most=room)
    if is_long or len(ids) >= room:
        raise QueryTooLongError(f"the query leaves no room for a document in {n_most} tokens; shorten the query")
    head, room = [*begin, *ids, *between], room - len(ids)

    def form(document: str, cut: int | None) -> tuple[int, ...]:
        if cut is None:
            require_may_fit(tokenizer, document, n_most, n_trained, cut=CUT_DOCUMENT)
        most = room if cut is None else min(cut, room)
        ids = tokenizer.encode(document, add_special=False, most=most)
        if cut is None and len(ids) > room:
            n_document = about_tokens(tokenizer, document, len(ids))
            raise too_long(len(head) + n_document + len(end), n_most, n_trained, exact=False, cut=CUT_DOCUMENT)
        return (*head, *ids[:most], *end)

    return form, len(head)


def _doubles(gguf: GGUF) -> bool:
    """Return whether two tokens stand between a pair of texts; old files of XLM-RoBERTa do not say it."""
    said = get_bool(gguf, "tokenizer.ggml.add_sep_token")
    if said is not None and get_text(gguf, "tokenizer.ggml.model") != "bert":
        return said
    kind, pre = get_text(gguf, "tokenizer.ggml.model"), get_text(gguf, "tokenizer.ggml.pre")
    return kind == "t5" or pre in _DOUBLED


def template_of(engine: Engine, gguf: GGUF) -> str:
    """Return the text of a question with places for the query and the document.

    It is the file's template for ranking, or else Qwen3-Reranker's question in the model's own chat template.

    Raises:
        CapabilityError: The model has neither.
        ModelFormatError: The file's template has no places, or far too many, or is far too long.
    """
    text = get_text(gguf, TEMPLATE)
    if text is None and engine.template is None:
        raise CapabilityError(
            f"the model {engine.card.name!r} has no template for ranking and no chat template, so it can't be asked "
            "about a document; use a reranker (edgedec list names some)"
        )
    if text is None:
        try:
            variables = thinking_variables(engine.requests.require_template(), False)
        except RequestError:  # it always thinks, so it answers as well as it can without
            variables = {}
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
        text = engine.requests.render(messages, variables=variables)
    places = _PLACES.findall(text)
    if not {QUERY, DOCUMENT} <= set(places) or len(places) > _MOST_PLACES or len(text) > _MOST_CHARACTERS:
        raise ModelFormatError(
            f"the template for ranking is {text[:80]!r} ({len(text)} characters); expected {QUERY} and {DOCUMENT}, "
            f"{_MOST_PLACES} such places and {_MOST_CHARACTERS} characters at the most: use another GGUF of the model"
        )
    return text


def question_form(tokenizer: Tokenizer, template: str, query: str, n_most: int, n_trained: int = 0) -> Form:
    """Return the form of a model that writes: a template with the query and the document in their places.

    The template's control tokens are read as such. All other text is tokenized together with what stands in the places,
    as in training; so words begin with their spaces.
    """
    parts: list[_Part | None] = []
    for piece in _PLACES.split(template):
        parts += [query] if piece == QUERY else [None] if piece == DOCUMENT else _spelled(tokenizer, piece)

    def form(document: str, cut: int | None) -> tuple[int, ...]:
        if cut is None:
            return _assembled(tokenizer, [document if part is None else part for part in parts], n_most, n_trained)
        most = min(cut, n_most)
        while most > 0:
            beginning = _beginning(tokenizer, document, most)
            ids = _ids(tokenizer, [beginning if part is None else part for part in parts])
            if len(ids) <= n_most:
                return ids
            most -= len(ids) - n_most
        raise QueryTooLongError(f"the query leaves no room for a document in {n_most} tokens; shorten the query")

    return form


def _spelled(tokenizer: Tokenizer, literal: str) -> list[_Part | None]:
    """Return a template's text in parts: its control tokens, and texts that may be tokenized with their neighbours."""
    parts: list[_Part | None] = []
    run: list[int] = []
    for token_id in [*encode_with_controls(tokenizer, literal, add_special=False), None]:
        if token_id is not None and tokenizer.piece(token_id):
            run.append(token_id)
            continue
        if run:
            parts.append(_as_text(tokenizer, run))
            run = []
        if token_id is not None:
            parts.append((token_id,))
    return parts


def _as_text(tokenizer: Tokenizer, ids: Sequence[int]) -> _Part:
    """Return a text whose tokens are these, or else the tokens themselves."""
    text = tokenizer.decode(ids)
    for spelled in (text, text.removeprefix(" ")):  # SentencePiece puts a space before a text
        if tokenizer.encode(spelled, add_special=False) == list(ids):
            return spelled
    return tuple(ids)


def _joined(parts: Iterable[_Part]) -> list[_Part]:
    """Return the parts with texts that follow one another made one."""
    joined: list[_Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        else:
            joined.append(part)
    return joined


def _ids(tokenizer: Tokenizer, parts: Iterable[_Part]) -> tuple[int, ...]:
    ids: list[int] = []
    for part in _joined(parts):
        ids += tokenizer.encode(part, add_special=False) if isinstance(part, str) else part
    return tuple(ids)


def _assembled(tokenizer: Tokenizer, parts: Iterable[_Part], n_most: int, n_trained: int) -> tuple[int, ...]:
    """Return the tokens of the parts, at most `n_most` (PromptTooLongError, before a long text is tokenized)."""
    joined = _joined(parts)
    for part in joined:
        if isinstance(part, str):
            require_may_fit(tokenizer, part, n_most, n_trained, cut=CUT_DOCUMENT)
    ids = _ids(tokenizer, joined)
    if len(ids) > n_most:
        raise too_long(len(ids), n_most, n_trained, cut=CUT_DOCUMENT)
    return ids


def _beginning(tokenizer: Tokenizer, text: str, most: int) -> str:
    """Return a text's first `most` tokens as text, without a character that is cut in two."""
    ids = tokenizer.encode(text, add_special=False, most=most)
    return text if len(ids) <= most else tokenizer.decode(ids[:most]).rstrip("\ufffd")
