"""Opening the grammar of a text: with a known end, beside a function, or with what earlier texts taught."""

from collections.abc import Hashable, Mapping
from threading import Lock
from typing import TYPE_CHECKING

from edgedec import plugins
from edgedec.constraint import Constraint, EarlierTexts, GrammarState, Predicate
from edgedec.errors import RequestError, argument
from edgedec.grammar import GRAMMAR_BYTES, Grammar, GrammarCompiler
from edgedec.sampling import SamplingParams
from edgedec.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgedec.decoding.closing import ClosingTokens
    from edgedec.decoding.predicate import AnyText


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
            from edgedec.decoding.predicate import PredicateConstraint

            return PredicateConstraint(state, state.predicate, self._tokenizer)
        if not close:
            return Constraint(state)
        from edgedec.decoding.closing import ClosingConstraint, ClosingTokens

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
        from edgedec.decoding.predicate import AnyText, PredicateConstraint, both

        with self._lock:
            self._any_text = self._any_text or AnyText(self._tokenizer)
        state = self._any_text if grammar is None else self._compiled(grammar)
        asked = predicate if state.predicate is None else both(state.predicate, predicate)
        return PredicateConstraint(state, asked, self._tokenizer)

    def open_aligned(self, grammar: Grammar, futures: EarlierTexts, key: Hashable, temperature: float) -> Constraint:
        """Return the constraint of a grammar that knows what became of earlier texts.

        Raises:
            RequestError: The grammar needs a predicate beside its masks; or as open.
        """
        state = self._compiled(grammar)
        if state.predicate is not None:
            raise RequestError(
                f"{argument('futures')} needs masks that say all, and uniqueItems of this schema is checked item by "
                f"item; leave {argument('futures')} or uniqueItems out"
            )
        return futures.open(state, (grammar, key, temperature), temperature)

    def _compiled(self, grammar: Grammar) -> GrammarState:
        """Return a compiled grammar's state before the first token."""
        with self._lock:
            if self._compiler is None:
                self._compiler = plugins.first_made(plugins.GRAMMARS, self._tokenizer, self._n_bytes)
            return self._compiler.compile(grammar)


def plain_draw_of(futures: object) -> Mapping[str, float]:
    """Return the options of the draw that the request option `futures` sets; nothing where it is None.

    Raises:
        RequestError: It is no EarlierTexts.
    """
    if futures is None:
        return {}
    if not isinstance(futures, EarlierTexts):
        name = type(futures).__name__
        raise RequestError(f"{argument('futures')} is a {name}; it must be EarlierTexts (edgedec.constraint)")
    return futures.plain_draw


def require_aligned(
    futures: EarlierTexts,
    grammar: Grammar | None,
    predicate: Predicate | None,
    params: SamplingParams,
    *,
    close: bool,
) -> Grammar:
    """Return the grammar of a text that is drawn by what earlier texts taught.

    Raises:
        RequestError: There is no grammar, or an option is set that does not go with the option futures.
    """
    if grammar is None:
        raise RequestError(f"{argument('futures')} needs a grammar or a JSON schema, found neither; give one")
    if predicate is not None or close:
        other = argument("json_close" if close else "predicate")
        raise RequestError(f"{argument('futures')} can't be combined with {other}; leave one of them out")
    futures.require(params)
    return grammar
