"""Opening the constraint of a text: that of its grammar, or what a method of the request makes of it."""

from dataclasses import replace
from threading import Lock
from typing import overload

from edgedec import plugins
from edgedec.constraint import Constraint
from edgedec.errors import RequestError, argument
from edgedec.grammar import GRAMMAR_BYTES, Grammar, GrammarCompiler, GrammarState
from edgedec.mark_vocabulary import MarkVocabulary
from edgedec.sampling import SamplingParams
from edgedec.sequence import Request
from edgedec.tagged import TaggedState, Tags
from edgedec.text_method import AskedText, TextMethod
from edgedec.thought_marks import Thoughts
from edgedec.thoughts import Anything, ThinkingConstraint, ThinkingVocabulary
from edgedec.tokenizer import Tokenizer

_PLAIN = Request((), SamplingParams(), 0)


class Grammars:
    """Opens the constraints of one model's texts; what is known of the vocabulary is kept. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, n_bytes: int = GRAMMAR_BYTES, fingerprint: str = "") -> None:
        self._tokenizer = tokenizer
        self._n_bytes = n_bytes
        self._fingerprint = fingerprint
        self._compiler: GrammarCompiler | None = None
        self._methods: dict[str, TextMethod] = {}
        self._thinking: dict[Thoughts, ThinkingVocabulary] = {}
        self._tagging: dict[tuple[str, ...], MarkVocabulary] = {}
        self._lock = Lock()

    def method(self, name: str) -> TextMethod:
        """Return the method of that name, which is made when it is first asked for.

        Raises:
            PluginError: No method has that name, or the method does not import.
        """
        with self._lock:
            if name not in self._methods:
                self._methods[name] = plugins.load_plugin(plugins.TEXT_METHODS, name)(self._tokenizer)
            return self._methods[name]

    @overload
    def open(self, grammar: Grammar, request: Request = ..., thoughts: Thoughts | None = ...) -> Constraint: ...
    @overload
    def open(
        self, grammar: Grammar | None, request: Request = ..., thoughts: Thoughts | None = ...
    ) -> Constraint | None: ...
    def open(
        self, grammar: Grammar | None, request: Request = _PLAIN, thoughts: Thoughts | None = None
    ) -> Constraint | None:
        """Return the constraint of one text of a request; None where neither a grammar nor a method makes one.

        A text that may begin with thoughts keeps to the constraint behind them.

        Raises:
            RequestError: As GrammarCompiler.compile and TextMethod.constraint; or two methods make a constraint.
            RuntimeUnavailableError: The plug-in's library is missing.
            PluginError: A plug-in is not there, or does not import.
        """
        state = None if grammar is None else self._compiled(grammar)
        names = list(request.methods)
        if state is not None and state.predicate is not None and "predicate" not in names:
            names.append("predicate")
        text = AskedText(request, grammar, state, self._fingerprint)
        made = {name: self.method(name).constraint(request.methods.get(name), text) for name in names}
        opened = {name: constraint for name, constraint in made.items() if constraint is not None}
        if len(opened) > 1:
            raise RequestError(
                f"{' and '.join(map(argument, opened))} can't be combined; leave all but one of them out"
            )
        constraint = next(iter(opened.values()), None if state is None else Constraint(state))
        if constraint is not None and grammar is not None:
            constraint.note_if_cut = grammar.note_if_cut
        if thoughts is None or (constraint is None and thoughts.budget is None):
            return constraint
        if grammar is not None and grammar.kind == "tagged":
            thoughts = thoughts.before_free_text()
        return ThinkingConstraint(
            constraint or Constraint(Anything(self._tokenizer.n_vocab)), thoughts, self._vocabulary(thoughts)
        )

    def _vocabulary(self, thoughts: Thoughts) -> ThinkingVocabulary:
        """Return the texts of the model's tokens as thoughts need them; they are read once for each kind of marks."""
        marks = replace(thoughts, opened=False, budget=None)
        with self._lock:
            if marks not in self._thinking:
                self._thinking[marks] = ThinkingVocabulary(self._tokenizer, marks)
            return self._thinking[marks]

    def _compiled(self, grammar: Grammar) -> GrammarState:
        """Return a grammar's state before the first token."""
        if grammar.kind == "tagged":
            tags = Tags.of(grammar)
            marks = tuple(tags.bodies)
            with self._lock:
                if marks not in self._tagging:
                    self._tagging[marks] = MarkVocabulary(self._tokenizer, marks, "".join(marks))
                vocabulary = self._tagging[marks]
            return TaggedState(tags, vocabulary, self._compiled)
        with self._lock:
            if self._compiler is None:
                self._compiler = plugins.first_made(plugins.GRAMMARS, self._tokenizer, self._n_bytes)
            return self._compiler.compile(grammar)
