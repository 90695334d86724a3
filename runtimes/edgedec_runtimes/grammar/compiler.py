"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): JSON schemas, regexes, Lark and GBNF."""

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgedec import plugins
from edgedec.errors import DeadEndError, RequestError, RuntimeUnavailableError
from edgedec.exact_json import dumps, exact_float
from edgedec.grammar import GRAMMAR_BYTES, Grammar, Predicate
from edgedec.memory.system import resident_reader, return_free_memory
from edgedec.plugins import install_command
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.grammar.exact_numbers import lark_of_inexact
from edgedec_runtimes.grammar.gbnf_lark import lark_of_gbnf
from edgedec_runtimes.grammar.limits import Limits, require_modest
from edgedec_runtimes.grammar.references import MAPS
from edgedec_runtimes.grammar.rewriting import Words, other_words
from edgedec_runtimes.grammar.vocabulary import Vocabulary

# White space stands where Python's json module puts it, and nowhere else: a small model that is allowed to go on with
# white space does so, and fixed white space makes more of a text certain. A schema's own "x-guidance" wins over this.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A slice: tokens that llguidance sorts out once for all masks, as most masks inside of JSON strings consist of them. Of
# its four slices this one has most of the effect (0.6 ms for a mask, without it 4 ms) at a quarter of their memory.
# Masks are the same with any slices or none.
_SLICE = r'[^"\\\x00-\x1F\x7F]{1,10}'
_N_REMEMBERED = 8  # compiled grammars; together they hold at most a fifth of the memory for a grammar
# llguidance follows references by recursion, with up to 5 kB of stack for a level (measured on x86-64). This is three
# times what limits.MOST_LEVELS levels take; the system only holds the part of a stack that was used.
_STACK_BYTES = 64 << 20
# llguidance's limits by name: the most that is ever allowed, and the bytes of memory for each unit, measured with the
# grammars of tests/runtimes/grammar/test_memory.py.
_LIMITS = {
    "max_items_in_row": (20_000, 3000),  # an object with some thousand optional properties
    "initial_lexer_fuel": (1_000_000, 64),  # takes at most a second
    "step_lexer_fuel": (1_000_000, 64),  # takes at most a second for each token
    "step_max_items": (200_000, 300),
    "max_lexer_states": (50_000, 1280),
    "max_grammar_size": (50_000, 1280),  # compiled in a few seconds
}
_PART_BYTES = 64  # of memory for each character of a schema that is said in other words
_LEAST_RETURNED = 1_000_000  # bytes that a text must have added before giving them back to the system pays
_CHECKED_CHARACTERS = 20_000  # of a grammar that is checked before a model is loaded, in a moment and little memory
_T = TypeVar("_T")
_stack_size = threading.Lock()  # the size of new stacks is a setting of the whole process


class Llguidance:
    """Implements edgedec.grammar.GrammarCompiler.

    Raises:
        RuntimeUnavailableError: llguidance is not installed.
        RequestError: The vocabulary has no end token, or llguidance refuses it.
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
        vocabulary.replace_tokens(self._tokenizer)
        weakref.finalize(self, vocabulary.let_go)
        self._modest = Limits(n_bytes)
        self._limits = self._api.LLParserLimits(
            verbose_errors=False, **{name: min(most, n_bytes // unit) for name, (most, unit) in _LIMITS.items()}
        )
        self._compiled: OrderedDict[Grammar, SharedMatcher] = OrderedDict()
        self._words: OrderedDict[Grammar, Words] = OrderedDict()  # of schemas refused as they are
        self._lock = threading.Lock()  # guards _compiled and _words
        self._resident = resident_reader()

    def compile(self, grammar: Grammar) -> "MatcherState":
        """Return the state of a grammar before its first token; the latest few grammars stay compiled.

        Raises:
            RequestError: The grammar is invalid, unsupported or too large, or the only text that keeps to it is "".
        """
        if grammar.kind == "gbnf":
            require_modest(grammar, self._modest)
            grammar = Grammar.lark(lark_of_gbnf(grammar.source))
        with self._lock:
            words = self._words.get(grammar)
        if words is not None:
            return self._in_words(*words)
        try:
            return self._in_words(grammar, None)
        except RequestError:
            words = other_words(grammar, self._modest.n_bytes // _PART_BYTES)
            if words is None:
                raise
        state = self._in_words(*words)
        with self._lock:
            self._words[grammar] = words
            while len(self._words) > _N_REMEMBERED:
                self._words.popitem(last=False)
        return state

    def _in_words(self, grammar: Grammar, predicate: Predicate | None) -> "MatcherState":
        """Return the state of a grammar as it is, whose texts must also keep to a predicate."""
        with self._lock:
            matched = self._compiled.get(grammar)
        if matched is None:
            require_modest(grammar, self._modest)
            return_free_memory()
            before = self._resident() or 0
            try:
                matcher = self._new_matcher(grammar)
            finally:
                return_free_memory()
            matched = SharedMatcher(matcher, max((self._resident() or 0) - before, len(grammar.source)))
        with self._lock:
            self._compiled[grammar] = matched
            self._compiled.move_to_end(grammar)
        self.forget_large(keep=grammar)
        state = self._state(matched, grammar)
        state.predicate = predicate
        return state

    def forget_large(self, keep: Grammar | None = None) -> None:
        """Forget compiled grammars, the oldest first, until the others keep to their share of the memory.

        `keep` is never forgotten. Any thread may call this.
        """
        with self._lock:
            for grammar in list(self._compiled):
                n_bytes = sum(each.n_bytes for each in self._compiled.values())
                if grammar != keep and (len(self._compiled) > _N_REMEMBERED or n_bytes > self._modest.n_bytes // 5):
                    del self._compiled[grammar]

    def fresh(self, grammar: Grammar) -> Any:
        """Return a new matcher of a grammar, which shares nothing with earlier ones. Any thread may call this."""
        with self._lock:
            self._compiled.pop(grammar, None)
        source = _source(self._api, grammar)
        return _on_a_deep_stack(lambda: self._api.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits))

    def _state(self, matched: "SharedMatcher", grammar: Grammar) -> "MatcherState":
        return MatcherState(self, matched, grammar, self._n_vocab, self._modest, self._resident)

    def _new_matcher(self, grammar: Grammar) -> Any:
        name = name_of(grammar)

        def make() -> Any:
            source = _source(self._api, grammar)
            matcher = self._api.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
            if matcher.is_error():
                raise _refused(name, matcher.get_error(), self._modest)
            first = self._state(SharedMatcher(matcher, 0), grammar)
            allowed = first.allowed()  # llguidance finds out only here that some grammars are too large
            if np.count_nonzero(allowed) == np.count_nonzero(allowed[self._end_ids]):
                raise RequestError(f"{name} has no text but the empty one; ask for something")
            return matcher

        return _guarded(name, lambda: _on_a_deep_stack(make))


def require_valid(grammar: Grammar) -> None:
    """Raise RequestError for a grammar of up to 20 kB that is invalid with any vocabulary: no model need be loaded.

    Nothing is checked where another package brings a compiler, which may take what llguidance refuses.
    """
    if len(grammar.source) > _CHECKED_CHARACTERS or len(plugins.plugins(plugins.GRAMMARS)) > 1:
        return
    if grammar.kind == "gbnf":
        grammar = Grammar.lark(lark_of_gbnf(grammar.source))
    message = _refusal(grammar)
    if message and other_words(grammar, GRAMMAR_BYTES // _PART_BYTES) is None:
        raise _refused(name_of(grammar), message, Limits())


def _refusal(grammar: Grammar) -> str:
    """Return why llguidance refuses a grammar whatever the vocabulary is; empty where it takes it.

    Raises:
        RequestError: The grammar is too large, or llguidance fails.
    """
    api = _library()
    require_modest(grammar)
    limits = api.LLParserLimits(verbose_errors=False, **{limit: most for limit, (most, _) in _LIMITS.items()})

    def check() -> str:
        return str(api.LLMatcher.validate_grammar(_source(api, grammar), limits=limits))

    return _guarded(name_of(grammar), lambda: _on_a_deep_stack(check))


_SAYS_NOTHING = ("title", "description", "default", "examples", "example", "$comment")


def _bare(schema: Any) -> Any:
    """Return a JSON schema, or a list of schemas, without what only people read."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    parts = ((key, part) for key, part in schema.items() if key not in _SAYS_NOTHING)
    return {
        key: {name: _bare(each) for name, each in part.items()}
        if key in MAPS and isinstance(part, dict)
        else part
        if key in ("const", "enum")
        else _bare(part)
        for key, part in parts
    }


@lru_cache(64)
def json_in_lark(schema: str, *, flexible: bool = False, exactly: bool = False) -> str:
    """Return the texts of a JSON schema as an expression within a grammar in the notation of Lark.

    Up to 20 spaces and line ends may be wherever JSON allows white space where it is `flexible`. A schema that
    llguidance does not take is said in other words, and else as that of any object (`exactly`: RequestError); what only
    a predicate can check is left out.
    """
    words = other_words(Grammar.json_schema(schema), GRAMMAR_BYTES // _PART_BYTES)
    for source in (schema, *([words[0].source] if words is not None else [])):
        said = _bare(json.loads(source, parse_float=exact_float))
        style: dict[str, Any] = {"whitespace_pattern": r"[ \n]{0,20}"} if flexible else {**_JSON_STYLE}
        style |= said["x-guidance"] if isinstance(said.get("x-guidance"), dict) else {}
        expression = f"%json {dumps({**said, 'x-guidance': style})}"
        with suppress(RequestError):
            if not _refusal(Grammar.lark(f"start: {expression}")):
                return expression
    if exactly:
        raise RequestError("the JSON schema can't be used within a grammar; simplify it")
    return json_in_lark('{"type": "object"}', flexible=flexible)


def _source(api: Any, grammar: Grammar) -> str:
    """Return a grammar as llguidance takes it."""
    matcher = api.LLMatcher
    if grammar.kind == "json_schema":
        exact = lark_of_inexact(grammar.source, _JSON_STYLE)
        return str(matcher.grammar_from_json_schema(grammar.source, defaults=_JSON_STYLE) if exact is None else exact)
    return str((matcher.grammar_from_regex if grammar.kind == "regex" else matcher.grammar_from_lark)(grammar.source))


@dataclass(slots=True)
class SharedMatcher:
    """A matcher that has taken no token yet, and about how many bytes it and its copies hold.

    A matcher and its copies share what they find out about a grammar's expressions.
    """

    matcher: Any
    n_bytes: int


_NOTHING = SharedMatcher(None, 0)


class MatcherState:
    """Implements edgedec.constraint.GrammarState by a copy of a matcher of llguidance.

    Copies of a matcher share and keep what they find out about expressions, and most limits of llguidance hold for one
    token only; so the growth of a matcher is measured. Where a matcher has grown to half of what it may hold, or has
    met a limit (perhaps by another text), this text goes on with a fresh matcher that takes the same tokens. That
    changes no answer.

    Args:
        compiler: Makes fresh matchers.
        matched: The matcher that all texts of this grammar share.
        n_vocab: Number of token ids.
        limits: The memory that the grammar may take.
        resident: Returns how many bytes the process holds; None where the system does not say it.
    """

    def __init__(
        self,
        compiler: Llguidance,
        matched: SharedMatcher,
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
        self.predicate: Predicate | None = None
        self._n_compiled = matched.n_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the text keeps to the grammar and nothing may follow."""
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    @property
    def may_end(self) -> bool:
        """Whether the text keeps to the grammar if it ends here."""
        return bool(self._matcher.is_accepting())

    def allowed(self) -> NDArray[np.bool_]:
        """Return bool[n_vocab], which tokens may follow.

        Raises:
            RequestError: No token may follow, or the grammar is too complex to say.
        """
        bits = self._mask()
        if self._matcher.is_error():
            self._replace()
            bits = self._mask()
        matcher = self._matcher
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise _stuck(self._name, matcher, self._limits)
        return np.unpackbits(bits, count=self._n_vocab, bitorder="little").view(np.bool_)

    def forced(self) -> Sequence[int]:
        """Return the ids of tokens that are certain to follow; perhaps not all of them."""
        tokens: list[int] = []
        if not self._matcher.is_stopped():
            tokens = self._measured(lambda: self._matcher.compute_ff_tokens())
        self._recover()
        return tokens

    def advance(self, token_id: int) -> bool:
        """Take a token and return True; return False and change nothing where the grammar does not allow it here."""
        if self._matcher.is_stopped():  # llguidance fails where a stopped matcher is given a token
            return False
        if self._matcher.try_consume_tokens([token_id]):
            self._taken.append(token_id)
            return True
        self._recover()
        return False

    def back(self, n_tokens: int) -> None:
        """Take back the last `n_tokens` tokens."""
        del self._taken[len(self._taken) - n_tokens :]
        self._matcher.rollback(n_tokens)
        self._recover()

    def close(self) -> None:
        """Free the memory of this state, and give what the matcher had grown by back to the system."""
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
        """Return what `act` returns, and note how much the matcher grew by it.

        A matcher that has grown too much is replaced beforehand.
        """
        if self._matched.n_bytes - self._n_compiled > self._limits.n_bytes // 2:
            self._replace()
        before = self._resident() or 0
        done = act()
        self._matched.n_bytes += max(0, (self._resident() or 0) - before)
        return done

    def _recover(self) -> None:
        """Replace a matcher in a state of error: a limit that only a draft met must not end the text."""
        if self._matcher.is_error():
            self._replace()

    def _replace(self) -> None:
        """Go on with a fresh matcher that has taken the same tokens."""
        self._matcher, self._matched = None, _NOTHING  # free the old one first
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
        self._matched = SharedMatcher(None, n_bytes)


def _stuck(name: str, matcher: Any, limits: Limits) -> RequestError:
    """Return the error to raise for a matcher that can't go on and may not end."""
    reason = f"{matcher.stop_reason()} {matcher.get_error()}"
    if "NoExtension" in reason:
        return DeadEndError(
            f"{name} has come to a dead end: no token of the vocabulary fits, and the text may not end here; change it"
        )
    return RequestError(f"{name} is too complex to go on ({_short(reason)}); simplify it, {limits.advice}")


def _refused(name: str, message: str, limits: Limits) -> RequestError:
    """Return the error to raise for a grammar that llguidance does not compile, with its message."""
    advice = f"; simplify it, {limits.advice}" if "too big" in message or "too many" in message else ""
    return RequestError(f"{name} can't be used: {_short(message)}{advice}")


_NAMES = {"json_schema": "the JSON schema", "regex": "the regular expression"}


def name_of(grammar: Grammar) -> str:
    """Return the name of a grammar for messages; for a regular expression with its beginning.

    >>> name_of(Grammar.regex("a|b")), name_of(Grammar.lark("start: x"))
    ("the regular expression 'a|b'", 'the grammar')
    """
    return _NAMES.get(grammar.kind, "the grammar") + (f" {grammar.source[:40]!r}" if grammar.kind == "regex" else "")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RuntimeUnavailableError(
            "structured output (JSON schemas, regular expressions, grammars) needs llguidance: "
            f"{install_command('llguidance')}"
        ) from error
    return llguidance


def _guarded(name: str, act: Callable[[], _T]) -> _T:
    """Return what `act` returns (RequestError for what fails inside of llguidance, panics of its Rust code too)."""
    try:
        return act()
    except ValueError as error:
        raise RequestError(f"{name} can't be used: {_short(str(error))}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which is no Exception and has no importable name
            raise
        raise RequestError(f"{name} can't be used: llguidance failed ({_short(str(error))}); simplify it") from error


def _on_a_deep_stack(act: Callable[[], _T]) -> _T:
    """Return what `act` returns, or raise what it raises, after running it in a thread with a large stack."""
    done: Future[_T] = Future()

    def work() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=work, name="edgedec-grammar", daemon=True)
    with _stack_size:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return done.result()


def _short(message: str) -> str:
    """Return a message of llguidance on one line, cut to 300 characters."""
    words = " ".join(message.split())
    return words if len(words) <= 300 else words[:297] + "..."
