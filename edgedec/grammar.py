"""Grammars: what a text may be, and how decoding keeps to it.

Before a token is drawn, the grammar rules tokens out: their logits become -inf, as with a logit bias, before every
other transform. So penalties, top-k, top-p and the temperature see the allowed tokens only, and the token is drawn from
p, renormalised over them. Which tokens are allowed after a text depends on the text alone, so drafts change nothing:
the mask of a draft's node is that of the path to it.

A plug-in (`edgedec.grammars`) compiles and matches grammars: another package's, where one takes the vocabulary.
"""

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, Protocol, get_args

from edgedec import plugins
from edgedec.closing import ClosingConstraint, ClosingTokens
from edgedec.constraint import Constraint, GrammarState, Predicate
from edgedec.errors import OptionError, RequestError, argument
from edgedec.futures import AlignedConstraint, Futures, require_plain_draw
from edgedec.predicate import AnyText, PredicateConstraint, both
from edgedec.sampling import SamplingParams
from edgedec.tokenizer import Tokenizer

JsonSchema = Mapping[str, Any] | str
Kind = Literal["json_schema", "regex", "lark", "gbnf"]

MAX_SOURCE_BYTES = 1_000_000
GRAMMAR_BYTES = 64_000_000
"""Most memory of compiled grammars where memory is ample; each text that keeps to one may take as much again."""
LEAST_GRAMMAR_BYTES = 6_000_000
"""The same limit where a memory plan has no term for grammars."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that a text keeps to; made by json_schema(), regex(), lark() or gbnf().

    Attributes:
        kind: The language of `source`.
        source: A JSON schema, a regular expression that the whole text matches, or a grammar in the notation of Lark or
            of llama.cpp (GBNF).

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
                f"the {self.kind} takes {n_bytes} bytes; it may take at most {MAX_SOURCE_BYTES}: make it smaller"
            )

    @classmethod
    def json_schema(cls, schema: JsonSchema) -> "Grammar":
        """Return the grammar of the JSON texts that are valid under a schema, given as a mapping or as JSON text.

        Raises:
            RequestError: The schema is no JSON object, or larger than 1 MB.
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
        """Return the grammar of the texts that a regular expression matches as a whole.

        Raises:
            RequestError: The expression is larger than 1 MB.
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, source: str) -> "Grammar":
        """Return a grammar in Lark's notation, whose rule `start` is the whole text.

        Raises:
            RequestError: The grammar is larger than 1 MB.
        """
        return cls("lark", source)

    @classmethod
    def gbnf(cls, source: str) -> "Grammar":
        """Return a grammar in llama.cpp's notation, GBNF, whose rule `root` is the whole text.

        Raises:
            RequestError: The grammar is larger than 1 MB.
        """
        return cls("gbnf", source)


def _checked(schema: str) -> str:
    """Return the text of a JSON schema; raise RequestError where it is no JSON object."""
    try:
        found = json.loads(schema) if len(schema) <= MAX_SOURCE_BYTES else {}  # Grammar refuses a larger one
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError(f"the JSON schema is a {type(found).__name__}; it must be an object")
    return schema


def chosen_grammar(grammar: Grammar | None, json_schema: JsonSchema | None, *, close: bool = False) -> Grammar | None:
    """Return the grammar that a request's options name, None for none.

    Args:
        grammar: The option of that name.
        json_schema: The option of that name.
        close: The option json_close.

    Raises:
        RequestError: Both a grammar and a schema are given, or close without either, or a value of a wrong type.
    """
    if not isinstance(close, bool):
        raise OptionError("json_close", close, "it must be True or False")
    if close and grammar is None and json_schema is None:
        raise RequestError(
            f"{argument('json_close')} needs a JSON schema or a grammar, found neither; give one, or leave "
            f"{argument('json_close')} out"
        )
    if grammar is not None and not isinstance(grammar, Grammar):
        raise RequestError(
            f"{argument('grammar')} is a {type(grammar).__name__}; it must be a Grammar: make one by "
            "Grammar.regex(...), Grammar.lark(...), Grammar.gbnf(...) or Grammar.json_schema(...)"
        )
    if json_schema is None:
        return grammar
    if grammar is not None:
        raise RequestError(
            f"both {argument('grammar')} and {argument('json_schema')} are given; a text keeps to one grammar: leave "
            "one of them out"
        )
    return Grammar.json_schema(json_schema)


def require_aligned(
    futures: object, grammar: Grammar | None, predicate: Predicate | None, params: SamplingParams, *, close: bool
) -> Grammar:
    """Return the grammar of a text that is drawn with Futures.

    Raises:
        RequestError: There is no grammar, or an option is set that does not go with Futures.
    """
    if not isinstance(futures, Futures):
        name = type(futures).__name__
        raise RequestError(f"{argument('futures')} is a {name}; it must be a Futures of edgedec.futures")
    if grammar is None:
        raise RequestError(f"{argument('futures')} needs a grammar or a JSON schema, found neither; give one")
    if predicate is not None or close:
        other = argument("json_close" if close else "predicate")
        raise RequestError(f"{argument('futures')} can't be combined with {other}; leave one of them out")
    require_plain_draw(params)
    return grammar


class GrammarCompiler(Protocol):
    """Compiles grammars for the vocabulary of one model; called from one thread at a time."""

    def compile(self, grammar: Grammar) -> GrammarState:
        """Return the grammar's state before the first token.

        Raises:
            RequestError: The grammar is invalid, too large, or uses something that is not supported.
        """


class GrammarCompilerFactory(Protocol):
    """What an entry point of `edgedec.grammars` names."""

    def __call__(self, tokenizer: Tokenizer, n_bytes: int = GRAMMAR_BYTES) -> GrammarCompiler | None:
        """Return a compiler for a tokenizer's vocabulary.

        Args:
            tokenizer: The model's.
            n_bytes: The most memory of the compiled grammars; each text that keeps to one may take as much again.

        Raises:
            RuntimeUnavailableError: The plug-in's library is missing.
        """


class Grammars:
    """Opens grammars for one model; tables of the vocabulary are built for the first grammar and kept."""

    def __init__(self, tokenizer: Tokenizer, n_bytes: int = GRAMMAR_BYTES) -> None:
        self._tokenizer = tokenizer
        self._n_bytes = n_bytes
        self._compiler: GrammarCompiler | None = None
        self._closing_tokens: ClosingTokens | None = None
        self._any_text: AnyText | None = None
        self._lock = Lock()

    def open(self, grammar: Grammar, bias: Mapping[int, float] | None = None, *, close: bool = False) -> Constraint:
        """Compile a grammar for one generation.

        Args:
            grammar: The grammar that the text keeps to.
            bias: The request's logit bias; no text is closed by a token that it rules out.
            close: Whether the text must be whole when its tokens are used up.

        Raises:
            RequestError: As GrammarCompiler.compile.
            RuntimeUnavailableError: The plug-in's library is missing.
            PluginError: The plug-in does not import.
        """
        state = self._compiled(grammar)
        if close and state.predicate is not None:
            raise RequestError(
                f"{argument('json_close')} can't close the texts of this schema in time, as its uniqueItems is checked "
                f"item by item; leave {argument('json_close')} or uniqueItems out"
            )
        if state.predicate is not None:
            return PredicateConstraint(state, state.predicate, self._tokenizer)
        if not close:
            return Constraint(state)
        with self._lock:
            if self._closing_tokens is None:
                self._closing_tokens = ClosingTokens(self._tokenizer)
            return ClosingConstraint(state, self._closing_tokens, bias)

    def open_constraint(
        self,
        grammar: Grammar | None,
        predicate: Predicate | None,
        bias: Mapping[int, float] | None = None,
        *,
        close: bool = False,
    ) -> Constraint | None:
        """Return the constraint of a grammar, of a predicate, or of both; None for neither (raises what open raises).

        Raises:
            RequestError: The predicate can't be called, or is combined with `close`.
        """
        if predicate is None:
            return None if grammar is None else self.open(grammar, bias, close=close)
        if not callable(predicate):
            raise RequestError(
                f"{argument('predicate')} is a {type(predicate).__name__}; it must be a function of a text and a bool"
            )
        if close:
            raise RequestError(f"{argument('json_close')} can't close a text that a predicate judges; leave one out")
        with self._lock:
            self._any_text = self._any_text or AnyText(self._tokenizer)
        state = self._any_text if grammar is None else self._compiled(grammar)
        asked = predicate if state.predicate is None else both(state.predicate, predicate)
        return PredicateConstraint(state, asked, self._tokenizer)

    def open_aligned(self, grammar: Grammar, futures: Futures, key: Hashable, temperature: float) -> Constraint:
        """Return the constraint of a grammar that knows what became of earlier texts; see AlignedConstraint.

        Raises:
            RequestError: The grammar needs a predicate beside its masks; or as open.
        """
        state = self._compiled(grammar)
        if state.predicate is not None:
            raise RequestError(
                f"{argument('futures')} needs masks that say all, and uniqueItems of this schema is checked item by "
                f"item; leave {argument('futures')} or uniqueItems out"
            )
        return AlignedConstraint(state, futures, (grammar, key, temperature), temperature)

    def _compiled(self, grammar: Grammar) -> GrammarState:
        """Return a compiled grammar's state before the first token."""
        with self._lock:
            if self._compiler is None:
                self._compiler = plugins.first_made(plugins.GRAMMARS, self._tokenizer, self._n_bytes)
            return self._compiler.compile(grammar)
