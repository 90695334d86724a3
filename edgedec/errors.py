"""Every error that edgedec raises on purpose.

EdgedecError
├── ModelError                 the model file or folder cannot be used
│   ├── ModelNotFoundError     there is no model of that name or path
│   ├── ModelFormatError       the file is damaged, truncated or of another format than expected
│   └── UnsupportedModelError  a sound file that this runtime, or edgedec, does not run
├── PullError                  a model could not be fetched, checked or stored
│   └── OfflineError           the network would have been needed, but was ruled out
├── RuntimeUnavailableError    a runtime, device or library is absent or the wrong version
│   └── RuntimeLostError       what ran the model was lost in the middle: its process, or a machine it ran on
├── PluginError                a plug-in is missing, does not import or breaks its contract
│   └── ScorerError            a caller's scorer of texts failed, took too long or returned no scores
├── RequestError               the request itself cannot be served
│   ├── OptionError            an option has a value that is out of range or not known
│   ├── PromptTooLongError     the prompt does not fit the context
│   ├── ContextFullError       the context is full before the generation is finished
│   ├── TemplateError          the chat template fails, loops or reaches outside its sandbox
│   ├── DeadEndError           no token keeps to the grammar after a text that may not end there
│   ├── BusyError              this thread is in the middle of another generation on the model
│   └── CutTextError           a text that keeps to a grammar was cut before it was whole (on the command line)
├── MemoryCapError             the plan is over the memory allowed, or the system refused memory
├── CapabilityError            the runtime declares that it cannot do this (trees, layers, fork, ...)
├── SessionError               a session is used after close, out of order, or in a forked child process
├── CancelledError             the caller cancelled
├── ConformanceError           a runtime or drafter breaks a contract of the conformance suite
└── StorageError               no space, no permission, or another failure of the disk

An error's message says what was found, what was expected and what to do. `exit_code` is the exit status of the command
line after the error; the codes are stable and listed in docs/cli.md. They are at most 125, except CancelledError's,
which is the shells' own for Ctrl-C.
"""

import copyreg
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_MARK = "\ufdd0"  # no character: texts don't hold it


def argument(name: str) -> str:
    """Return the name of an argument for the message of an EdgedecError, marked as such.

    An argument is an option of edgedec.load or of a generation. `str(error)` shows the name as it is here;
    `error.naming` replaces it by another one, as the command line does with the options that a person types.

    >>> error = RequestError(f"leave {argument('n_ctx')} out")
    >>> str(error), error.naming({"n_ctx": "--context"})
    ('leave n_ctx out', 'leave --context out')
    """
    return f"{_MARK}{name}{_MARK}"


def counted(n: int, noun: str) -> str:
    """Return a number with its noun, such as "1 token" or "2 tokens"; for nouns whose plural takes an s.

    >>> counted(1, "token"), counted(0, "token"), counted(4096, "token")
    ('1 token', '0 tokens', '4096 tokens')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


class EdgedecError(Exception):
    """Base of all errors that edgedec raises on purpose."""

    exit_code = 1

    def __str__(self) -> str:
        return self.naming({})

    @property
    def marked(self) -> str:
        """The message in which arguments are still marked, for the message of another error that quotes this one."""
        return super().__str__()

    def naming(self, names: Mapping[str, str]) -> str:
        """Return the message with the arguments in it called by `names`; one that is not in `names` keeps its name."""
        parts = self.marked.split(_MARK)
        parts[1::2] = [names.get(name, name) for name in parts[1::2]]
        return "".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle makes the error of again, without __init__; what can't be pickled becomes its repr."""
        fields = {name: value if _is_picklable(value) else repr(value) for name, value in self.__dict__.items()}
        return copyreg.__newobj__, (type(self), *self.args), fields  # type: ignore[attr-defined]  # untyped


def _is_picklable(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # pickle raises what the value's own methods raise, too
        return False
    return True


class ModelError(EdgedecError):
    """The model file or folder cannot be used."""

    exit_code = 10


class ModelNotFoundError(ModelError):
    """No path, catalogue entry or cached file has the given name."""

    exit_code = 11


class ModelFormatError(ModelError):
    """The file is damaged, truncated or of another format than expected."""

    exit_code = 12


class UnsupportedModelError(ModelError):
    """The file is sound, but holds no text decoder or one that the runtime does not run."""

    exit_code = 13


class PullError(EdgedecError):
    """A model could not be fetched, verified or stored."""

    exit_code = 20


class OfflineError(PullError):
    """The network would have been needed, but was ruled out."""

    exit_code = 21


class RuntimeUnavailableError(EdgedecError):
    """A runtime, device or library is absent or of an untested version."""

    exit_code = 30


class RuntimeAbsentError(RuntimeUnavailableError):
    """An optional library is not installed, or this machine lacks the device of an optional runtime."""

    exit_code = 30


class RuntimeLostError(RuntimeUnavailableError):
    """What ran the model was lost: its process ended, or another machine that it ran on no longer answers.

    The model's sessions are empty then, and can be used again: their next forward loads the model anew.

    Attributes:
        loss: What was lost, as a clause without advice.
        token_ids: The tokens that were generated before the loss, where a text was being written: a request with
            resume=token_ids goes on behind them.
    """

    exit_code = 33

    def __init__(self, loss: str, advice: str = "") -> None:
        """Say what was lost, and what the caller can do about it."""
        super().__init__(f"{loss}: {advice}" if advice else loss)
        self.loss = loss
        self.token_ids: tuple[int, ...] = ()


class PluginError(EdgedecError):
    """A plug-in is missing, does not import or breaks its contract."""

    exit_code = 31


class ScorerError(PluginError):
    """A caller's scorer of texts failed, took too long, or returned something else than scores.

    Attributes:
        texts: The texts that were to be scored, so that they are not lost; empty where none were written.
    """

    exit_code = 32

    def __init__(self, message: str, texts: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.texts = texts


class RequestError(EdgedecError):
    """The request itself cannot be served: a value out of range, an empty prompt."""

    exit_code = 40


class OptionError(RequestError):
    """An option has a value that is out of range or not known.

    Attributes:
        argument: The Python name of the option.
        value: The value that was given.
        accepted: Which values are accepted, as a sentence.
    """

    exit_code = 40

    def __init__(self, name: str, value: object, accepted: str) -> None:
        super().__init__(f"{argument(name)} is {'missing' if value is None else repr(value):.200}; {accepted}")
        self.argument, self.value, self.accepted = name, value, accepted


class PromptTooLongError(RequestError):
    """The prompt does not fit the context.

    Attributes:
        n_tokens: About how many tokens the prompt has; 0 where they were not counted.
        n_most: How many tokens it may have; 0 where `n_tokens` is.
    """

    exit_code = 41
    n_tokens = 0
    n_most = 0


class ContextFullError(RequestError):
    """The context is full before the generation is finished."""

    exit_code = 42


class TemplateError(RequestError):
    """The chat template fails, runs without end or reaches outside its sandbox."""

    exit_code = 43


class DeadEndError(RequestError):
    """No token keeps to the grammar or the predicate after a text that may not end there."""

    exit_code = 40


class BusyError(RequestError):
    """This thread is in the middle of another generation on the same model."""

    exit_code = 44


class CutTextError(RequestError):
    """A text that keeps to a grammar was cut, by max_tokens or a full context, before it was whole."""

    exit_code = 45


class MemoryCapError(EdgedecError):
    """The plan is over the memory allowed, or the system refused memory."""

    exit_code = 50


class CapabilityError(EdgedecError):
    """The runtime declares that it cannot do what was requested."""

    exit_code = 51


class SessionError(EdgedecError):
    """A session is used after close, out of order, or in a forked child process."""

    exit_code = 52


class CancelledError(EdgedecError):
    """The caller cancelled the work; on the command line, Ctrl-C."""

    exit_code = 130


class ConformanceError(EdgedecError):
    """A runtime or a drafter breaks a contract of the conformance suite."""

    exit_code = 54


class StorageError(EdgedecError):
    """No space, no permission, or another failure of the disk."""

    exit_code = 60


@contextmanager
def as_storage_error(what: str, remedy: str = "") -> Iterator[None]:
    """Turn an OSError of the block into a StorageError: what failed, what the system says, and what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what}: {error.strerror or error}" + (f"; {remedy}" if remedy else "")) from error
