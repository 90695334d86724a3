"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): JSON schemas, regular expressions, Lark."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RequestError, RuntimeUnavailableError
from edgedec.extras import install_command
from edgedec.grammar import Grammar
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.grammar.limits import require_modest
from edgedec_runtimes.grammar.vocabulary import Vocabulary

# Spaces where Python's json module puts them, and nowhere else: a small model that may go on with white space does, and
# between fixed ones more of a text is forced. A schema's own "x-guidance" goes before these.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Tokens sorted out once, as most masks within JSON strings are made of them. Of llguidance's four slices this one has
# most of the effect (0.6 ms a mask instead of 4) at a quarter of their memory; masks are the same with any or none.
_SLICE = r'[^"\\\x00-\x1F\x7F]{1,10}'
_N_REMEMBERED = 8  # compiled grammars
# llguidance follows references by recursion, which took up to 5 kB a level (measured on x86-64): three times what
# limits.MOST_LEVELS takes, of which only what is used is ever held.
_STACK_BYTES = 64 << 20
_LIMITS = {
    "max_items_in_row": 20_000,  # an object with some thousand optional properties
    "initial_lexer_fuel": 1_000_000,  # at most a second
    "step_lexer_fuel": 1_000_000,  # the same, a token
    "step_max_items": 200_000,
    "max_lexer_states": 50_000,  # of 1 to 2 kB
    "max_grammar_size": 50_000,  # compiled in a few seconds
}
_T = TypeVar("_T")


class Llguidance:
    """Implements edgedec.grammar.GrammarCompiler.

    Raises:
        RuntimeUnavailableError: llguidance is not installed.
        RequestError: The vocabulary has no end token, or nothing that llguidance could use.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._api = _library()
        vocabulary = Vocabulary(tokenizer)
        if not vocabulary.end_ids:
            raise RequestError("the model has no end token, with which a grammar's text would end; use another model")
        self._n_vocab = tokenizer.n_vocab
        self._tokenizer = _guarded(
            "the vocabulary",
            lambda: self._api.LLTokenizer(
                vocabulary, n_vocab=self._n_vocab, eos_token=vocabulary.end_ids, slices=[_SLICE]
            ),
        )
        vocabulary.built(self._tokenizer)
        self._limits = self._api.LLParserLimits(verbose_errors=False, **_LIMITS)
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def compile(self, grammar: Grammar) -> "MatcherState":
        """Return the place before the first token; the latest few grammars are remembered.

        Raises:
            RequestError: The grammar is invalid, uses what is not supported, or is too large.
        """
        if grammar not in self._compiled:
            self._compiled[grammar] = self._made(grammar)
            if len(self._compiled) > _N_REMEMBERED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return MatcherState(self._compiled[grammar], self._n_vocab)

    def _made(self, grammar: Grammar) -> Any:
        name = _NAMES[grammar.kind]
        require_modest(grammar)

        def make() -> Any:
            source = self._source(grammar)
            found, messages = self._api.LLMatcher.validate_grammar_with_warnings(
                source, self._tokenizer, limits=self._limits
            )
            if found:
                raise RequestError(f"{name} can't be used: {_short(' '.join(messages))}")
            matcher = self._api.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
            if matcher.is_error():
                raise RequestError(f"{name} can't be used: {_short(matcher.get_error())}")
            MatcherState(matcher, self._n_vocab).allowed()  # some that are too large are found out here only
            return matcher

        return _guarded(name, lambda: _on_a_deep_stack(make))

    def _source(self, grammar: Grammar) -> str:
        matcher = self._api.LLMatcher
        if grammar.kind == "json_schema":
            return str(matcher.grammar_from_json_schema(grammar.source, defaults=_JSON_STYLE))
        from_text = matcher.grammar_from_regex if grammar.kind == "regex" else matcher.grammar_from_lark
        return str(from_text(grammar.source))


class MatcherState:
    """Implements edgedec.grammar.GrammarState by a copy of a matcher of llguidance.

    Args:
        fresh: A matcher that has taken no token yet; not changed.
        n_vocab: Tokens of the vocabulary.
    """

    def __init__(self, fresh: Any, n_vocab: int) -> None:
        self._fresh = fresh
        self._matcher = fresh.deep_copy()
        self._n_vocab = n_vocab
        self._taken: list[int] = []

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and nothing may follow."""
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    def allowed(self) -> NDArray[np.bool_]:
        """Return bool[n_vocab], the tokens that may follow (RequestError where none may, or limits are met)."""
        matcher = self._matcher
        bits = np.frombuffer(_guarded("the grammar", matcher.compute_bitmask), np.uint8)
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise _stuck(matcher)
        return np.unpackbits(bits, count=self._n_vocab, bitorder="little").view(np.bool_)

    def forced(self) -> Sequence[int]:
        """Return tokens that are certain to follow."""
        tokens: list[int] = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        self._recover()
        return tokens

    def advance(self, token_id: int) -> bool:
        """Take a token; False, with nothing changed, where the grammar has no place for it."""
        if self._matcher.is_stopped():  # which to ask then is an error
            return False
        if self._matcher.try_consume_tokens([token_id]):
            self._taken.append(token_id)
            return True
        self._recover()
        return False

    def back(self, n_tokens: int) -> None:
        """Take back the latest tokens."""
        del self._taken[len(self._taken) - n_tokens :]
        self._matcher.rollback(n_tokens)
        self._recover()

    def _recover(self) -> None:
        """Leave a state of error: a draft that met a limit must not end a text that would not have."""
        if self._matcher.is_error():
            self._matcher = self._fresh.deep_copy()
            self._matcher.consume_tokens(self._taken)


def _stuck(matcher: Any) -> RequestError:
    """Return the error of a matcher that can't go on, and may not end either."""
    reason = f"{matcher.stop_reason()} {matcher.get_error()}"
    if "NoExtension" in reason:
        return RequestError(
            "the grammar has come to a dead end: no token of the vocabulary fits, and the text may not end here; "
            "change the grammar"
        )
    return RequestError(f"the grammar is too complex to go on ({_short(reason)}); simplify it")


_NAMES = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RuntimeUnavailableError(
            "structured output (JSON schemas, regular expressions, grammars) needs llguidance: "
            f"{install_command('grammar')}"
        ) from error
    return llguidance


def _guarded(name: str, act: Callable[[], _T]) -> _T:
    """Return what `act` does; what goes wrong inside llguidance, a panic of its Rust code too, is a RequestError."""
    try:
        return act()
    except ValueError as error:
        raise RequestError(f"{name} can't be used: {_short(str(error))}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which is no Exception and has no importable name
            raise
        raise RequestError(f"{name} can't be used: llguidance failed ({_short(str(error))}); simplify it") from error


def _on_a_deep_stack(act: Callable[[], _T]) -> _T:
    """Return what `act` does in a thread of its own, whose stack is larger than a system's usual one."""
    done: list[_T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(act())
        except BaseException as error:  # raised below, in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=work, name="edgedec-grammar", daemon=True)
    usual = threading.stack_size(_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def _short(message: str) -> str:
    """Return a message of llguidance's on one line, at most 300 characters."""
    words = " ".join(message.split())
    return words if len(words) <= 300 else words[:297] + "..."
