"""Grammars: what a text may be; edgedec.decoding.grammars keeps to them.

Before a token is drawn, the grammar rules tokens out: their logits become -inf, as with a logit bias, before every
other transform. So penalties, top-k, top-p and the temperature see the allowed tokens only, and the token is drawn from
p, renormalised over them. Which tokens are allowed after a text depends on the text alone, so drafts change nothing:
the mask of a draft's node is that of the path to it.

A plug-in (edgedec.plugins.GRAMMARS) compiles and matches grammars: another package's, where one takes the vocabulary.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from edgedec import exact_json
from edgedec.errors import RequestError, argument

JsonSchema = Mapping[str, Any] | str
Kind = Literal["json_schema", "regex", "lark", "gbnf", "tagged"]

MAX_SOURCE_BYTES = 1_000_000
GRAMMAR_BYTES = 64_000_000
"""Most memory of compiled grammars where memory is ample; each text that keeps to one may take as much again."""
LEAST_GRAMMAR_BYTES = 6_000_000
"""The same limit where a memory plan has no term for grammars."""
_NOTE_IF_OPEN = (
    'objects may have keys of any name, so a text may never end: give a JSON schema with "additionalProperties": false'
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that a text keeps to; made by json_schema(), regex(), lark(), gbnf() or tagged().

    Attributes:
        kind: The language of `source`.
        source: A JSON schema, a regular expression that the whole text matches, or a grammar in the notation of Lark or
            of llama.cpp (GBNF), or what tagged() makes.

    Raises:
        RequestError: The source is no str, or larger than 1 MB.

    >>> Grammar.json_schema({"type": "integer"})
    Grammar(kind='json_schema', source='{"type": "integer"}')
    """

    kind: Kind
    source: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            kinds = ", ".join(get_args(Kind))
            raise RequestError(f"the grammar's kind is {self.kind!r:.40}; it must be one of {kinds}")
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
            return cls("json_schema", _checked(exact_json.dumps(schema, allow_nan=False)))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema can't be written as JSON: {error}") from error

    @property
    def note_if_cut(self) -> str:
        """What to change where a text of the grammar was cut; empty unless its objects may have keys of any name."""
        nodes = [json.loads(self.source)] if self.kind == "json_schema" else []
        while nodes:
            if isinstance(node := nodes.pop(), list):
                nodes += node
            elif isinstance(node, dict):
                is_object = "properties" in node or "object" in (node.get("type") or "")
                if is_object and False not in (node.get("additionalProperties"), node.get("unevaluatedProperties")):
                    return _NOTE_IF_OPEN
                nodes += [node[name] for name in node if name not in ("const", "default", "enum", "examples")]
        return ""

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Return the grammar of the texts that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, source: str) -> "Grammar":
        """Return a grammar in Lark's notation, whose rule `start` is the whole text."""
        return cls("lark", source)

    @classmethod
    def gbnf(cls, source: str) -> "Grammar":
        """Return a grammar in llama.cpp's notation, GBNF, whose rule `root` is the whole text."""
        return cls("gbnf", source)

    @classmethod
    def tagged(
        cls, bodies: Mapping[str, "Grammar"], *, start: "Grammar | None" = None, binds: str = "(?!)"
    ) -> "Grammar":
        """Return a grammar of free text with marks: behind each mark the text keeps to that mark's grammar.

        Where a text of that grammar is whole and nothing may follow it, the free text goes on.

        Args:
            bodies: By mark, such as "<tool_call>", the grammar of what stands behind it.
            start: The grammar of what a text may be as a whole in place of free text, without a mark.
            binds: A regular expression: where it matches a text's beginning, which keeps to `start` so far, the text
                must go on by `start`.

        Raises:
            RequestError: There is neither a mark nor a start, a mark is blank, a grammar is tagged itself, or the
                regular expression is none.

        >>> Grammar.tagged({"<n>": Grammar.regex("[0-9]+</n>")}).kind
        'tagged'
        """
        if not bodies and start is None:
            raise RequestError("there is neither a mark nor a start; give at least one")
        for mark, body in (*bodies.items(), *(() if start is None else (("the start", start),))):
            if not isinstance(mark, str) or not mark.strip() or not isinstance(body, Grammar):
                raise RequestError(f"{mark!r:.40} has {body!r:.40}; give a text that is not blank, and a Grammar")
            if body.kind == "tagged":
                raise RequestError(f"the grammar of {mark!r:.40} is tagged itself; give one that is not")
        try:
            re.compile(binds)
        except (re.error, TypeError) as error:
            raise RequestError(f"binds is {binds!r:.60}; it must be a regular expression ({error})") from None
        each = {mark: [body.kind, body.source] for mark, body in bodies.items()}
        said = [each, None if start is None else [start.kind, start.source], binds]
        return cls("tagged", exact_json.dumps(said, ensure_ascii=False))


def _checked(schema: str) -> str:
    """Return the text of a JSON schema; raise RequestError where it is no JSON object."""
    try:
        parsed = json.loads(schema) if len(schema) <= MAX_SOURCE_BYTES else {}  # Grammar refuses a larger one
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise RequestError(f"the JSON schema is a {type(parsed).__name__}; it must be an object")
    return schema


def chosen_grammar(grammar: Grammar | None, json_schema: JsonSchema | None) -> Grammar | None:
    """Return the grammar that a request's options name, None for none.

    Raises:
        RequestError: Both a grammar and a schema are given, or a value of a wrong type.
    """
    if json_schema is None:
        return grammar
    if grammar is not None:
        raise RequestError(
            f"both {argument('grammar')} and {argument('json_schema')} are given; a text keeps to one grammar: leave "
            "one of them out"
        )
    return Grammar.json_schema(json_schema)


class Predicate(Protocol):
    """Says which texts are allowed."""

    def __call__(self, text: str, is_end: bool, /) -> bool:
        """Return whether a text is allowed to end here (`is_end`), or to stand there and go on.

        The same arguments must always give the same answer.

        Args:
            text: The text from its beginning. Where only some bytes of its last character are there, a U+FFFD stands
                for that character. A function that refuses U+FFFD allows only characters that are one token.
            is_end: Whether the text ends here.
        """


class GrammarState(Protocol):
    """A text's state in a grammar: it takes tokens and takes them back; what is allowed depends on its tokens alone."""

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and no token may follow."""

    @property
    def may_end(self) -> bool:
        """Whether the text is whole; tokens may still follow."""

    @property
    def predicate(self) -> Predicate | None:
        """What the texts must keep to beside the tokens that the state allows; None where that is all."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return bool[n_vocab]: which tokens may follow, among them the end tokens where the text may end.

        Raises:
            RequestError: No token may follow, or finding out takes more time or memory than the limits allow.
        """

    def forced(self) -> Sequence[int]:
        """Return tokens that are certain to follow, perhaps not all of them."""

    def advance(self, token_id: int) -> bool:
        """Take a token and return True; where the grammar does not allow it, change nothing and return False."""

    def back(self, n_tokens: int) -> None:
        """Take back the last `n_tokens` tokens."""

    def close(self) -> None:
        """Free the memory of the state; calling it again does nothing."""


class GrammarCompiler(Protocol):
    """Compiles grammars for the vocabulary of one model; called from one thread at a time."""

    def compile(self, grammar: Grammar) -> GrammarState:
        """Return the grammar's state before the first token.

        Raises:
            RequestError: The grammar is invalid, too large, or uses something that is not supported.
        """
