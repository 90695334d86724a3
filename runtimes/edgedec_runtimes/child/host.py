"""The child's side: it loads a model with the runtime in this process, and answers calls of it."""

import importlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from time import sleep
from typing import ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CancelledError, EdgedecError, RuntimeUnavailableError
from edgedec.load_options import LoadOptions
from edgedec.memory.system import return_free_memory
from edgedec.model import EncoderSession, ExactRows, Forward, ForwardItem, Model, Session
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import CancelToken, OnProgress, Progress
from edgedec_runtimes.child.messages import LOAD, Answer, Ask, Cancel, Channel, GoOn, Message, Report
from edgedec_runtimes.child.rows import SharedRows
from edgedec_runtimes.child.tokenizer import Vocabulary

_AGAIN_S = 0.002
_AHEAD = 64  # rows: the next forward begins at most so far before the end of the latest one, or asks


@dataclass(frozen=True, slots=True)
class Opened:
    """What the parent is told of a model that was loaded."""

    card: ModelCard
    capabilities: Capabilities
    vocabulary: Vocabulary


@dataclass(frozen=True, slots=True)
class Result:
    """A Forward on its way to the parent.

    Attributes:
        shape: The shape of its rows of logits.
        row: Where they begin in the shared rows; None where they come along in `logits`.
        logits: f32[n_wanted, n_vocab], or None.
        hidden: As in Forward.
        best: As in Forward.
        exact: What Session.exact_rows says for each n_past that the next forward of the session may have, where the
            parent asks for that at every step.
    """

    shape: tuple[int, int]
    row: int | None
    logits: NDArray[np.float32] | None
    hidden: dict[int, NDArray[np.float32]]
    best: list[int]
    exact: dict[int, ExactRows]


Sent = tuple[int, ForwardItem, bool]
"""The number of an item's session, the item without it, and whether `Result.exact` is wanted."""


class CallbackError(Exception):
    """The application's callback raised an exception, which the parent raises again."""


class Hosted(Protocol):
    """What answers a parent's calls: each of its methods is one.

    Attributes:
        beside: The names of calls that do not wait for the others.
        reporting: The names of calls whose last argument takes progress, or is None.
        sessions: The open sessions by the numbers that the parent gave them.
        loading: Cancels the loading.
    """

    beside: ClassVar[frozenset[str]]
    reporting: ClassVar[frozenset[str]]
    sessions: dict[int, Session]
    loading: CancelToken


class Calls:
    """The calls that a model's parent may make; see Hosted."""

    beside = frozenset({"encode", "least_tokens", "decode", "tokens"})
    reporting = frozenset({"open", "forward"})

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}
        self.loading = CancelToken()
        self._model: Model | None = None
        self._rows: SharedRows | None = None

    @property
    def model(self) -> Model:
        """The model, once it is loaded."""
        assert self._model is not None, "the parent loads a model before it asks for anything else"
        return self._model

    def open(self, target: str, path: Path, options: LoadOptions, on_progress: OnProgress | None) -> Opened:
        """Load a model by the function `target` ("module:function"), which takes a path and options."""
        module, _, name = target.partition(":")
        load: Callable[[Path, LoadOptions], Model] = getattr(importlib.import_module(module), name)
        self._model = load(path, replace(options, cancel=self.loading, on_progress=on_progress))
        return_free_memory()
        tokenizer = self._model.tokenizer
        infill, controls = dict(tokenizer.infill_ids), tuple(tokenizer.control_texts)
        vocabulary = Vocabulary(tokenizer.n_vocab, tokenizer.bos_token, tokenizer.eos_token, infill, controls)
        return Opened(self._model.card, self._model.capabilities, vocabulary)

    def share_rows(self, path: Path, n_rows: int) -> None:
        """Map the file in which rows of logits are returned."""
        self._rows = SharedRows(path, n_rows, self.model.card.n_vocab)

    def encode(self, text: str, add_special: bool, parse_special: bool, most: int | None) -> list[int]:
        """Return the token ids of a text."""
        encode = self.model.tokenizer.encode
        return encode(text, add_special=add_special, parse_special=parse_special, most=most)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of a text's tokens."""
        return self.model.tokenizer.least_tokens(text)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids."""
        return self.model.tokenizer.decode(token_ids)

    def tokens(self, start: int, stop: int) -> tuple[list[bytes], list[bool]]:
        """Return what each token of a range adds to a text, and whether it ends a generation."""
        tokenizer = self.model.tokenizer
        ids = range(start, stop)
        return [tokenizer.piece(i) for i in ids], [tokenizer.is_end(i) for i in ids]

    def batch_invariant(self) -> int | bool:
        """Return how many rows of a forward are bit-equal to single steps."""
        return self.model.batch_invariant

    def session(self, number: int, n_ctx: int) -> None:
        """Open a session."""
        self.sessions[number] = self.model.session(n_ctx)

    def fork(self, number: int, twin: int) -> None:
        """Fork a session."""
        self.sessions[twin] = self.sessions[number].fork()

    def close_session(self, number: int) -> None:
        """Close a session."""
        self.sessions.pop(number).close()

    def forward(self, items: list[Sent], on_progress: OnProgress | None) -> list[Result]:
        """Evaluate items."""
        made = [replace(item, session=self.sessions[number]) for number, item, _ in items]
        if len(made) == 1 and on_progress is not None:
            forwards = [made[0].session.evaluate(made[0], on_progress)]
        else:
            forwards = self.model.forward(made)
        exact = [_exact(item) if wants_exact else {} for item, (_, _, wants_exact) in zip(made, items, strict=True)]
        return self._results(forwards, exact)

    def _results(self, forwards: list[Forward], exact: list[dict[int, ExactRows]]) -> list[Result]:
        results, n = [], 0
        for forward, is_exact in zip(forwards, exact, strict=True):
            rows = forward.logits
            fits = self._rows is not None and n + len(rows) <= len(self._rows.rows)
            if fits and self._rows is not None:
                self._rows.rows[n : n + len(rows)] = rows
            hidden = {layer: np.array(states) for layer, states in forward.hidden.items()}
            results.append(
                Result(rows.shape, n if fits else None, None if fits else rows, hidden, forward.best, is_exact)
            )
            n += len(rows)
        return results

    def final_states(self, number: int, tokens: NDArray[np.int32], n_first: int | None) -> NDArray[np.float32]:
        """Return the final states of a text's tokens."""
        return np.array(cast(EncoderSession, self.sessions[number]).final_states(tokens, n_first))

    def exact_rows(self, number: int, n_past: int, measure: int) -> ExactRows:
        """Return how many rows of a forward have the bits of single steps."""
        return self.sessions[number].exact_rows(n_past, measure)

    def keep(self, number: int, rows: NDArray[np.int32]) -> None:
        """Keep a path of the last tree."""
        self.sessions[number].keep(rows)

    def save(self, number: int) -> bytes:
        """Return a session's cached KV."""
        return self.sessions[number].save()

    def load(self, number: int, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned."""
        self.sessions[number].load(data, n_tokens)

    def close(self) -> None:
        """Free the model."""
        if self._model is not None:
            self._model.close()


def _exact(item: ForwardItem) -> dict[int, ExactRows]:
    """Return what the session says of exact rows at each n_past that may follow the item."""
    stop = item.n_past + item.n_rows
    return {n_past: item.session.exact_rows(n_past) for n_past in range(max(item.n_past + 1, stop - _AHEAD), stop + 1)}


class Host:
    """Receives calls and answers them, one at a time, but those of a tokenizer do not wait for a forward."""

    def __init__(self, channel: Channel, calls: Hosted) -> None:
        self._channel = channel
        self._calls = calls
        self._for_model: SimpleQueue[Ask | GoOn] = SimpleQueue()
        self._for_beside: SimpleQueue[Ask | GoOn] = SimpleQueue()
        self._unanswered: dict[int, tuple[int, ...]] = {}  # forwards: the call's number, and their sessions
        self._cancelled: set[int] = set()

    def serve(self) -> None:
        """Answer calls until the parent closes the pipe, which ends the process."""
        threading.Thread(target=self._receive, daemon=True).start()
        threading.Thread(target=self._answer_all, args=(self._for_beside,), daemon=True).start()
        self._answer_all(self._for_model)

    def _receive(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._take(message)
        finally:  # the parent has ended or closed the pipe; a native call may still be running
            os._exit(0)

    def _take(self, message: Message) -> None:
        if isinstance(message, Cancel):
            self._cancel(message.session)
        elif isinstance(message, Ask):
            if message.sessions:
                self._unanswered[message.number] = message.sessions
            (self._for_beside if message.method in self._calls.beside else self._for_model).put(message)
        elif isinstance(message, GoOn):
            self._for_model.put(message)

    def _cancel(self, session: int) -> None:
        """Cancel the forward that a session is in or waits for; without one, nothing happens."""
        if session == LOAD:
            self._calls.loading.cancel()
        for number, sessions in list(self._unanswered.items()):
            if session in sessions and number not in self._cancelled:
                self._cancelled.add(number)
                threading.Thread(target=self._cancel_until_answered, args=(number, session), daemon=True).start()

    def _cancel_until_answered(self, number: int, session: int) -> None:
        """Cancel again and again: a forward that has not quite begun does not notice."""
        while number in self._unanswered and (cancel_session := self._calls.sessions.get(session)) is not None:
            cancel_session.cancel()
            sleep(_AGAIN_S)

    def _answer_all(self, asks: SimpleQueue[Ask | GoOn]) -> None:
        while True:
            ask = asks.get()
            if isinstance(ask, Ask):
                self._answer(ask)

    def _answer(self, ask: Ask) -> None:
        value, failure = None, None
        try:
            if ask.number in self._cancelled:
                raise CancelledError("the forward was cancelled before it began")
            takes_progress = ask.method in self._calls.reporting
            report = (self._reporter(ask.number) if ask.reports else None,) if takes_progress else ()
            value = getattr(self._calls, ask.method)(*ask.arguments, *report)
        except CallbackError:
            failure = EdgedecError("the progress callback raised an exception")
        except EdgedecError as error:
            failure = error
        except Exception as error:  # a defect of the runtime
            failure = RuntimeUnavailableError(f"the model's process failed: {type(error).__name__}: {error}")
        self._unanswered.pop(ask.number, None)
        self._cancelled.discard(ask.number)
        open_sessions = {} if ask.method in self._calls.beside else self._calls.sessions
        n_cached = {number: session.n_cached for number, session in open_sessions.items()}
        self._channel.send(Answer(ask.number, value, failure, n_cached))

    def _reporter(self, number: int) -> OnProgress:
        """Return a callback that reports to the parent and waits; meanwhile other calls are answered."""

        def report(progress: Progress) -> None:
            self._channel.send(Report(number, progress))
            while isinstance(message := self._for_model.get(), Ask):
                self._answer(message)
            if message.stop:
                raise CallbackError

        return report
