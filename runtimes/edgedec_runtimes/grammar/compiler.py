"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): JSON schemas, regular expressions, Lark."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RequestError, RuntimeUnavailableError
from edgedec.extras import install_command
from edgedec.grammar import GRAMMAR_BYTES, Grammar
from edgedec.memory.system import resident_reader, return_free_memory
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.grammar.limits import Limits, require_modest
from edgedec_runtimes.grammar.vocabulary import Vocabulary

# Spaces where Python's json module puts them, and nowhere else: a small model that may go on with white space does, and
# between fixed ones more of a text is forced. A schema's own "x-guidance" goes before these.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Tokens sorted out once, as most masks within JSON strings are made of them. Of llguidance's four slices this one has
# most of the effect (0.6 ms a mask instead of 4) at a quarter of their memory; masks are the same with any or none.
_SLICE = r'[^"\\\x00-\x1F\x7F]{1,10}'
_N_REMEMBERED = 8  # compiled grammars, and never more of their memory than a fifth
# llguidance follows references by recursion, which took up to 5 kB a level (measured on x86-64): three times what
# limits.MOST_LEVELS takes, of which only what is used is ever held.
_STACK_BYTES = 64 << 20
# Most that is ever allowed, and the bytes of memory that one of it takes: measured with the grammars of
# tests/runtimes/grammar/test_memory.py, where nothing else took as much.
_LIMITS = {
    "max_items_in_row": (20_000, 3000),  # an object with some thousand optional properties
    "initial_lexer_fuel": (1_000_000, 64),  # at most a second
    "step_lexer_fuel": (1_000_000, 64),  # the same, a token
    "step_max_items": (200_000, 300),
    "max_lexer_states": (50_000, 1280),
    "max_grammar_size": (50_000, 1280),  # compiled in a few seconds
}
_LEAST_RETURNED = 1_000_000  # bytes that a text's place has grown by, for which giving them back pays
_T = TypeVar("_T")
_stack_size = threading.Lock()  # it is the whole process's


class Llguidance:
    """Implements edgedec.grammar.GrammarCompiler.

    Raises:
        RuntimeUnavailableError: llguidance is not installed.
        RequestError: The vocabulary has no end token, or nothing that llguidance could use.
    """

    def __init__(self, tokenizer: Tokenizer, n_bytes: int = GRAMMAR_BYTES) -> None:
        self._api = _library()
        vocabulary = Vocabulary(tokenizer)
        if not vocabulary.end_ids:
            raise RequestError("the model has no end token, with which a grammar's text would end; use another model")
        self._end_ids = vocabulary.end_ids
        self._n_vocab = tokenizer.n_vocab
        self._tokenizer = _guarded(
            "the vocabulary",
            lambda: self._api.LLTokenizer(
                vocabulary, n_vocab=self._n_vocab, eos_token=vocabulary.end_ids, slices=[_SLICE]
            ),
        )
        vocabulary.built(self._tokenizer)
        self._modest = Limits(n_bytes)
        self._limits = self._api.LLParserLimits(
            verbose_errors=False, **{name: min(most, n_bytes // unit) for name, (most, unit) in _LIMITS.items()}
        )
        self._compiled: OrderedDict[Grammar, Matched] = OrderedDict()
        self._lock = threading.Lock()  # of what is remembered
        self._resident = resident_reader()

    def compile(self, grammar: Grammar) -> "MatcherState":
        """Return the place before the first token; the latest few grammars are remembered.

        Raises:
            RequestError: The grammar is invalid, uses what is not supported, is too large, or has no text but "".
        """
        with self._lock:
            matched = self._compiled.get(grammar)
        if matched is None:
            require_modest(grammar, self._modest)
            return_free_memory()
            before = self._resident() or 0
            try:
                matcher = self._made(grammar)
            finally:
                return_free_memory()
            matched = Matched(matcher, max((self._resident() or 0) - before, len(grammar.source)))
        with self._lock:
            self._compiled[grammar] = matched
            self._compiled.move_to_end(grammar)
        self.forget_large(keep=grammar)
        return self._state(matched, grammar)

    def forget_large(self, keep: Grammar | None = None) -> None:
        """Keep the newest grammars, as many as there is memory for; `keep` in any case. Any thread may ask."""
        with self._lock:
            for grammar in list(self._compiled):
                n_bytes = sum(each.n_bytes for each in self._compiled.values())
                if grammar != keep and (len(self._compiled) > _N_REMEMBERED or n_bytes > self._modest.n_bytes // 5):
                    del self._compiled[grammar]

    def fresh(self, grammar: Grammar) -> Any:
        """Compile a grammar that was compiled before, into a matcher of its own. Any thread may ask."""
        with self._lock:
            self._compiled.pop(grammar, None)
        source = self._source(grammar)
        return _on_a_deep_stack(lambda: self._api.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits))

    def _state(self, matched: "Matched", grammar: Grammar) -> "MatcherState":
        return MatcherState(self, matched, grammar, self._n_vocab, self._modest, self._resident)

    def _made(self, grammar: Grammar) -> Any:
        name = name_of(grammar)

        def make() -> Any:
            source = self._source(grammar)
            matcher = self._api.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
            if matcher.is_error():
                raise _refused(name, matcher.get_error(), self._modest)
            first = self._state(Matched(matcher, 0), grammar)
            allowed = first.allowed()  # some are found out to be too large here only
            if np.count_nonzero(allowed) == np.count_nonzero(allowed[self._end_ids]):
                raise RequestError(f"{name} has no text but the empty one; ask for something")
            return matcher

        return _guarded(name, lambda: _on_a_deep_stack(make))

    def _source(self, grammar: Grammar) -> str:
        matcher = self._api.LLMatcher
        if grammar.kind == "json_schema":
            return str(matcher.grammar_from_json_schema(grammar.source, defaults=_JSON_STYLE))
        from_text = matcher.grammar_from_regex if grammar.kind == "regex" else matcher.grammar_from_lark
        return str(from_text(grammar.source))


@dataclass(slots=True)
class Matched:
    """A matcher that has taken no token yet, and about what it and its copies hold: what they find out, they share."""

    matcher: Any
    n_bytes: int


_NOTHING = Matched(None, 0)


class MatcherState:
    """Implements edgedec.constraint.GrammarState by a copy of a matcher of llguidance.

    Copies of a matcher share what they find out about expressions, and keep it; most of its limits hold for one token
    only. So its growth is measured. Where one has grown to half of what it may, or has met a limit (which other texts
    may have brought it to), this text goes on with a fresh one that takes the same tokens. That changes no answer.

    Args:
        compiler: What makes fresh matchers.
        matched: The matcher of all texts of this grammar.
        grammar: The grammar.
        n_vocab: Tokens of the vocabulary.
        limits: What may be taken.
        resident: Tells what the process holds, in bytes.
    """

    def __init__(
        self,
        compiler: Llguidance,
        matched: Matched,
        grammar: Grammar,
        n_vocab: int,
        limits: Limits,
        resident: Callable[[], int | None],
    ) -> None:
        self._compiler = compiler
        self._matched = matched
        self._matcher = matched.matcher.deep_copy()
        self._grammar = grammar
        self._name = name_of(grammar)
        self._n_vocab = n_vocab
        self._limits = limits
        self._resident = resident
        self._taken: list[int] = []
        self._n_compiled = matched.n_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and nothing may follow."""
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    @property
    def may_end(self) -> bool:
        """Whether the text is whole; more may follow."""
        return bool(self._matcher.is_accepting())

    def allowed(self) -> NDArray[np.bool_]:
        """Return bool[n_vocab], the tokens that may follow (RequestError where none may, or limits are met)."""
        bits = self._mask()
        if self._matcher.is_error():
            self._replace()
            bits = self._mask()
        matcher = self._matcher
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise _stuck(self._name, matcher, self._limits)
        return np.unpackbits(bits, count=self._n_vocab, bitorder="little").view(np.bool_)

    def forced(self) -> Sequence[int]:
        """Return tokens that are certain to follow."""
        tokens: list[int] = []
        if not self._matcher.is_stopped():
            tokens = self._measured(lambda: self._matcher.compute_ff_tokens())
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

    def close(self) -> None:
        """Free the memory of this place; what the matcher had grown by goes back to the system."""
        if self._matcher is None:
            return
        grown = self._matched.n_bytes - self._n_compiled
        self._matcher, self._matched = None, _NOTHING
        self._compiler.forget_large()
        if grown >= _LEAST_RETURNED:
            return_free_memory()

    def _mask(self) -> NDArray[np.uint8]:
        bits = self._measured(lambda: _guarded(self._name, self._matcher.compute_bitmask))
        return np.frombuffer(bits, np.uint8)

    def _measured(self, act: Callable[[], _T]) -> _T:
        """Do something by which the matcher may grow; before it, one that has grown too much is replaced."""
        if self._matched.n_bytes - self._n_compiled > self._limits.n_bytes // 2:
            self._replace()
        before = self._resident() or 0
        done = act()
        self._matched.n_bytes += max(0, (self._resident() or 0) - before)
        return done

    def _recover(self) -> None:
        """Leave a state of error: a draft that met a limit must not end a text that would not have."""
        if self._matcher.is_error():
            self._replace()

    def _replace(self) -> None:
        """Go on with a fresh matcher at the same place."""
        self._matcher, self._matched = None, _NOTHING  # first of all free
        return_free_memory()
        matcher = _guarded(self._name, lambda: self._compiler.fresh(self._grammar))
        before = self._resident() or 0
        matcher.consume_tokens(self._taken)
        n_bytes = max(0, (self._resident() or 0) - before)
        if n_bytes > self._limits.n_bytes:
            raise RequestError(
                f"{self._name} takes too much memory for a text as long as this; simplify it, {self._limits.advice}"
            )
        self._matcher, self._n_compiled = matcher, 0
        self._matched = Matched(None, n_bytes)


def _stuck(name: str, matcher: Any, limits: Limits) -> RequestError:
    """Return the error of a matcher that can't go on, and may not end either."""
    reason = f"{matcher.stop_reason()} {matcher.get_error()}"
    if "NoExtension" in reason:
        return RequestError(
            f"{name} has come to a dead end: no token of the vocabulary fits, and the text may not end here; change it"
        )
    return RequestError(f"{name} is too complex to go on ({_short(reason)}); simplify it, {limits.advice}")


def _refused(name: str, message: str, limits: Limits) -> RequestError:
    """Return the error of a grammar that llguidance does not compile."""
    advice = f"; simplify it, {limits.advice}" if "too big" in message or "too many" in message else ""
    return RequestError(f"{name} can't be used: {_short(message)}{advice}")


_NAMES = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}


def name_of(grammar: Grammar) -> str:
    """Return what a message calls a grammar; of an expression, with its beginning.

    >>> name_of(Grammar.regex("a|b")), name_of(Grammar.lark("start: x"))
    ("the regular expression 'a|b'", 'the grammar')
    """
    return _NAMES[grammar.kind] + (f" {grammar.source[:40]!r}" if grammar.kind == "regex" else "")


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
    with _stack_size:
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
