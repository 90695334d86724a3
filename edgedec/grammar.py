"""Grammars: what a text may be, and how decoding keeps to it.

A grammar rules tokens out before each is drawn: their logits become -inf, as with a logit bias, before every other
transform. So penalties, top-k, top-p and the temperature see only what may come, and the token's law is p, renormalised
over the tokens allowed. What is allowed after a text is a function of the text, so that drafts change nothing: the mask
of a draft's node is that of the path to it.

The matching itself is a plug-in (`edgedec.grammars`); the first one that is installed does it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, Protocol, get_args

from edgedec import plugins
from edgedec.closing import ClosingConstraint, ClosingTokens
from edgedec.constraint import Constraint, GrammarState
from edgedec.errors import OptionError, RequestError, argument
from edgedec.tokenizer import Tokenizer

JsonSchema = Mapping[str, Any] | str
Kind = Literal["json_schema", "regex", "lark"]

MAX_SOURCE_BYTES = 1_000_000
GRAMMAR_BYTES = 64_000_000
"""What compiled grammars may take where memory is ample, and as much again each text that keeps to one."""
LEAST_GRAMMAR_BYTES = 6_000_000
"""The same where there is no plan for grammars, but one for the rest."""


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
        if self.kind not in get_args(Kind):
            known = ", ".join(get_args(Kind))
            raise RequestError(f"the grammar's kind is {self.kind!r:.40}; it must be one of {known}")
        if not isinstance(self.source, str):
            raise RequestError(f"the {self.kind} is a {type(self.source).__name__}; it must be a str")
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
        if not isinstance(schema, Mapping):
            raise RequestError(
                f"the JSON schema is a {type(schema).__name__}; it must be an object (a dict), or the text of one"
            )
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


def chosen_grammar(grammar: Grammar | None, json_schema: JsonSchema | None, *, close: bool = False) -> Grammar | None:
    """Return what a request asks to keep to (RequestError where it asks for two things, or to close nothing)."""
    if not isinstance(close, bool):
        raise OptionError("json_close", close, "it must be True or False")
    if close and grammar is None and json_schema is None:
        raise RequestError(f"{argument('json_close')} needs a JSON schema or a grammar beside it")
    if grammar is not None and not isinstance(grammar, Grammar):
        raise RequestError(
            f"{argument('grammar')} is a {type(grammar).__name__}; it must be a Grammar: make one by "
            "Grammar.regex(...), Grammar.lark(...) or Grammar.json_schema(...)"
        )
    if json_schema is None:
        return grammar
    if grammar is not None:
        raise RequestError(
            f"{argument('grammar')} and {argument('json_schema')} are both given; a text keeps to one of them"
        )
    return Grammar.json_schema(json_schema)


class GrammarCompiler(Protocol):
    """Compiles grammars for the vocabulary of one model. May be called from one thread at a time."""

    def compile(self, grammar: Grammar) -> GrammarState:
        """Return the place before the first token.

        Raises:
            RequestError: The grammar is invalid, uses what is not supported, or is too large.
        """


class GrammarCompilerFactory(Protocol):
    """What an entry point of `edgedec.grammars` names; RuntimeUnavailableError where its library is missing.

    `n_bytes` is the most memory that compiled grammars may take, and as much again each text that keeps to one.
    """

    def __call__(self, tokenizer: Tokenizer, n_bytes: int = GRAMMAR_BYTES) -> GrammarCompiler: ...


class Grammars:
    """Opens grammars for one model; what that takes of the vocabulary is built for the first one, and kept."""

    def __init__(self, tokenizer: Tokenizer, n_bytes: int = GRAMMAR_BYTES) -> None:
        self._tokenizer = tokenizer
        self._n_bytes = n_bytes
        self._compiler: GrammarCompiler | None = None
        self._closing_tokens: ClosingTokens | None = None
        self._lock = Lock()

    def open(self, grammar: Grammar, bias: Mapping[int, float] | None = None, *, close: bool = False) -> Constraint:
        """Compile a grammar for one generation.

        Args:
            grammar: What the text keeps to.
            bias: The request's logit bias; no text is closed by a token that it rules out.
            close: Whether the text is to be whole when its tokens are used up.

        Raises:
            RequestError: As GrammarCompiler.compile.
            RuntimeUnavailableError: The library that does it is missing.
            PluginError: No plug-in does it.
        """
        state = self._compiled(grammar)
        if not close:
            return Constraint(state)
        with self._lock:
            if self._closing_tokens is None:
                self._closing_tokens = ClosingTokens(self._tokenizer)
            return ClosingConstraint(state, self._closing_tokens, bias)

    def _compiled(self, grammar: Grammar) -> GrammarState:
        with self._lock:
            if self._compiler is None:
                name = next(iter(plugins.plugins(plugins.GRAMMARS)))
                factory: GrammarCompilerFactory = plugins.load_plugin(plugins.GRAMMARS, name)
                self._compiler = factory(self._tokenizer, self._n_bytes)
            return self._compiler.compile(grammar)
