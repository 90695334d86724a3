"""Grammars: what a text may be, and how decoding keeps to it.

A grammar rules tokens out before each is drawn: their logits become -inf, as with a logit bias, before every other
transform. So penalties, top-k, top-p and the temperature see only what may come, and the token's law is p, renormalised
over the tokens allowed. What is allowed after a text is a function of the text, so that drafts change nothing: the mask
of a draft's node is that of the path to it.

The matching itself is a plug-in (`edgedec.grammars`); the first one that is installed does it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec import plugins
from edgedec.errors import RequestError
from edgedec.tokenizer import Tokenizer

JsonSchema = Mapping[str, Any] | str
Kind = Literal["json_schema", "regex", "lark"]

MAX_SOURCE_BYTES = 1_000_000
_FORBIDDEN = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text may be; made by json_schema(), regex() or lark().

    Attributes:
        kind: The language of `source`.
        source: A JSON schema, a regular expression that the whole text matches, or a grammar in Lark's notation.

    >>> Grammar.json_schema({"type": "integer"})
    Grammar(kind='json_schema', source='{"type": "integer"}')
    """

    kind: Kind
    source: str

    def __post_init__(self) -> None:
        n_bytes = len(self.source.encode(errors="surrogatepass"))
        if n_bytes > MAX_SOURCE_BYTES:
            raise RequestError(
                f"the {self.kind} takes {n_bytes} bytes; at most {MAX_SOURCE_BYTES} are compiled: cut it down"
            )

    @classmethod
    def json_schema(cls, schema: JsonSchema) -> "Grammar":
        """Return the grammar of the JSON texts that are valid under a schema, an object or the text of one.

        Raises:
            RequestError: It is no JSON object, or larger than 1 MB.
        """
        if isinstance(schema, str):
            return cls("json_schema", _checked(schema))
        try:
            return cls("json_schema", _checked(json.dumps(schema, allow_nan=False)))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema can't be written as JSON: {error}") from error

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Return the grammar of the texts that a regular expression matches as a whole (RequestError over 1 MB)."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, source: str) -> "Grammar":
        """Return a grammar in Lark's notation, whose rule `start` is the text (RequestError over 1 MB)."""
        return cls("lark", source)


def _checked(schema: str) -> str:
    """Return the text of a schema, where it is one."""
    try:
        found = json.loads(schema) if len(schema) <= MAX_SOURCE_BYTES else {}  # the size is Grammar's to refuse
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError(f"the JSON schema is a {type(found).__name__}; it must be an object")
    return schema


def chosen_grammar(grammar: Grammar | None, json_schema: JsonSchema | None) -> Grammar | None:
    """Return what a request asks to keep to (RequestError where it asks for two things)."""
    if json_schema is None:
        return grammar
    if grammar is not None:
        raise RequestError("both grammar and json_schema are given; a text keeps to one: leave out the other")
    return Grammar.json_schema(json_schema)


class GrammarState(Protocol):
    """A text's place in a grammar. Goes forth and back; what is allowed depends on the tokens taken alone."""

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and nothing may follow."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return bool[n_vocab], the tokens that may follow; end tokens where the text may end.

        Raises:
            RequestError: None may follow, or finding out takes more than the limits allow.
        """

    def forced(self) -> Sequence[int]:
        """Return tokens that are certain to follow; may be fewer than there are."""

    def advance(self, token_id: int) -> bool:
        """Take a token; False, with nothing changed, where the grammar has no place for it."""

    def back(self, n_tokens: int) -> None:
        """Take back the latest tokens."""


class GrammarCompiler(Protocol):
    """Compiles grammars for the vocabulary of one model. May be called from one thread at a time."""

    def compile(self, grammar: Grammar) -> GrammarState:
        """Return the place before the first token.

        Raises:
            RequestError: The grammar is invalid, uses what is not supported, or is too large.
        """


class GrammarCompilerFactory(Protocol):
    """What an entry point of `edgedec.grammars` names; RuntimeUnavailableError where its library is missing."""

    def __call__(self, tokenizer: Tokenizer) -> GrammarCompiler: ...


class Grammars:
    """Opens grammars for one model; what that takes of the vocabulary is built for the first one, and kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiler: GrammarCompiler | None = None
        self._lock = Lock()

    def open(self, grammar: Grammar) -> "Constraint":
        """Compile a grammar for one generation.

        Raises:
            RequestError: As GrammarCompiler.compile.
            RuntimeUnavailableError: The library that does it is missing.
            PluginError: No plug-in does it.
        """
        with self._lock:
            if self._compiler is None:
                name = next(iter(plugins.plugins(plugins.GRAMMARS)))
                factory: GrammarCompilerFactory = plugins.load_plugin(plugins.GRAMMARS, name)
                self._compiler = factory(self._tokenizer)
            return Constraint(self._compiler.compile(grammar))


class Constraint:
    """The grammar of one generation: what may follow the text so far, and each path of a draft."""

    def __init__(self, state: GrammarState) -> None:
        self._state = state
        self._ahead: list[int] = []  # tokens that the state holds beyond the text

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and nothing may follow."""
        self._go(())
        return self._state.is_complete

    def masked(self, logits: NDArray[np.float32], path: Sequence[int] = ()) -> NDArray[np.float32]:
        """Return f32[n_vocab], the logits with -inf for every token that may not follow the text and `path`.

        Args:
            logits: f32[n_vocab], of the row of the path's last token; not changed.
            path: Tokens of a draft, which stand only if they are allowed themselves.

        Raises:
            RequestError: No token may follow, or finding out takes more than the limits allow.
        """
        allowed = self._state.allowed() if self._go(path) else np.zeros(0, np.bool_)
        n = min(len(allowed), len(logits))
        masked = np.full_like(logits, _FORBIDDEN)  # rows may be longer than the vocabulary
        np.copyto(masked[:n], logits[:n], where=allowed[:n])
        return masked

    def allows(self, path: Sequence[int], token_id: int) -> bool:
        """Tell whether a token has a place after the text and `path`; some tokenizations that are never drawn have."""
        return self._go((*path, token_id))

    def forced(self) -> tuple[int, ...]:
        """Return tokens that are certain to follow the text; may be fewer than there are."""
        self._go(())
        return tuple(self._state.forced())

    def commit(self, token_id: int) -> None:
        """Take a token of the text."""
        if not self._ahead:
            self._state.advance(token_id)
        elif self._ahead[0] == token_id:
            del self._ahead[0]
        else:
            self._go((token_id,))
            self._ahead.clear()

    def _go(self, path: Sequence[int]) -> bool:
        """Stand after the text and a path; False, somewhere on the way, where the grammar has no place for it."""
        common = 0
        while common < min(len(path), len(self._ahead)) and path[common] == self._ahead[common]:
            common += 1
        if common < len(self._ahead):
            self._state.back(len(self._ahead) - common)
            del self._ahead[common:]
        for token_id in path[common:]:
            if not self._state.advance(token_id):
                return False
            self._ahead.append(token_id)
        return True
