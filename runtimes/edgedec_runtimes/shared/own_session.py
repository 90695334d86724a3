"""OwnSession, the base class of all runtimes' sessions: a SessionState counts what its KV cache holds."""

import math
import struct
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, RequestError, SessionError, counted
from edgedec.head_state import HeadState
from edgedec.model import Forward, ForwardItem, Session
from edgedec.progress import OnProgress
from edgedec_runtimes.shared.library_model import LibraryModel, ModelLock
from edgedec_runtimes.shared.session_state import SessionState

_HEAD = struct.Struct("<64sI")
_BESIDE = b"beside keys and values:"


class Follower(HeadState, Protocol):
    """The state of a draft head that a session keeps, forks, saves and restores together with its KV cache.

    Call its methods with the model's lock held.
    """

    def saved(self, n_tokens: int) -> bytes:
        """Return what the head knows of the first tokens of the text."""

    def restore(self, data: bytes, n_tokens: int) -> None:
        """Know what saved() returned for `n_tokens` tokens; where another head saved it, or b"", know nothing."""


class SessionLock:
    """Holds a model's lock inside a block, which begins with a SessionError where the session is closed."""

    def __init__(self, lock: ModelLock, state: SessionState) -> None:
        self._lock, self._state = lock, state

    def __enter__(self) -> None:
        self._lock.__enter__()
        if self._state.is_closed:
            self._lock.threads.release()
            self._state.check_open()

    def __exit__(self, *_: object) -> None:
        self._lock.threads.release()


class OwnSession(Session):
    """The part of edgedec.model.Session that does not depend on where keys and values lie.

    A runtime's session implements `_fork`, `_arrays`, `_take` and `_free`, and `_move` where it has trees.

    Attributes:
        state: What the KV cache holds.
        follower: The trained draft head that follows the text, which is saved and restored with it; None for none.
    """

    follower: Follower | None = None

    def __init__(self, model: LibraryModel[Any, Any], n_ctx: int, n_layer: int | None = None) -> None:
        """Begin empty; `n_layer` is how many layers are counted on their own, all where it is None."""
        self._model = model
        n_counted = model.card.n_layer if n_layer is None else n_layer
        self.state = SessionState(n_ctx, n_counted, has_places=model.has_places)
        self._lock = SessionLock(model.lock, self.state)
        self._scales = (0.0,) * len(model.card.adapters)

    def using(self) -> "SessionLock":
        """Hold the model's lock inside the block (SessionError where the session is closed)."""
        return self._lock

    @cached_property  # which is an attribute after the first read: every step reads it
    def model(self) -> LibraryModel[Any, Any]:
        """The model this session belongs to."""
        return self._model

    @property
    def draft_head(self) -> Follower | None:
        """The trained draft head that follows the session's text, or None."""
        return self.follower

    @property
    def scales(self) -> tuple[float, ...]:
        """What the part of each of the model's adapters is multiplied by."""
        return self._scales

    @scales.setter
    def scales(self, scales: tuple[float, ...]) -> None:
        with self._model.lock:
            self.state.check_open()
            if len(scales) != len(self._scales):
                raise RequestError(f"there are {len(scales)} scales of {counted(len(self._scales), 'adapter')}")
            self.state.restore(0, True)
            self._scales = scales
            self._adapt()

    def _adapt(self) -> None:
        """Begin to use the scales, where the runtime doesn't look at them in each forward."""

    @property
    def n_ctx(self) -> int:
        """Most tokens that the session can hold."""
        return self.state.n_ctx

    @property
    def n_cached(self) -> int:
        """Tokens in the KV cache, counted along the prefix."""
        return self.state.n_cached

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate an item; see edgedec.model.Session."""
        return self._model.forward_with_progress((item,), on_progress)[0]

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree and drop its other rows; see edgedec.model.Session."""
        with self._model.lock:
            slots = self.state.leave_tree(rows)
            self._move(slots)
            self.state.hold_path(slots)

    def _move(self, slots: NDArray[np.int32]) -> None:
        """Move keys and values from `slots`, int32[n] ascending, to the slots from n_cached on."""
        raise NotImplementedError

    def fork(self) -> "OwnSession":
        """Open a second session with the cached prefix of this one."""
        with self._model.lock:
            self.state.check_settled("forked")
            twin, n = self._fork(), self.n_cached
            twin.state.restore(n, self.state.written[:, :n], self.state.held_places(n))
            twin._scales = self._scales
            return twin

    def _fork(self) -> "OwnSession":
        """Return a second session whose first n_cached slots hold what this one's hold."""
        raise NotImplementedError

    def save(self) -> bytes:
        """Serialize the cached KV; see edgedec.model.Session."""
        with self._model.lock:
            self.state.check_settled("saved")
            if self.state.places is not None and not self._model.has_places:
                raise SessionError("a session with positions of its own can't be saved; evaluate its tokens again")
            n = self.n_cached
            arrays = (*self._places_kept(n), *self._arrays(n))
            return self._head(n) + b"".join(array.tobytes() for array in arrays) + self._marked_beside(n)

    def _places_kept(self, n: int) -> tuple[NDArray[np.int32], ...]:
        """Return what save() writes of the places of the first `n` rows; nothing where they are always positions."""
        return (self.state.held_places(n),) if self._model.has_places else ()

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned for `n_tokens` tokens; on an error the session is as it was.

        Raises:
            ModelFormatError: The session is too short, or the data is not of this model with these options.
        """
        with self._model.lock:
            self.state.check_open()
            self._check_length(n_tokens)
            head = self._head(n_tokens)
            of_places = [(np.int32, (n_tokens, 3))] if self._model.has_places else []
            layout = [(np.dtype(dtype), shape) for dtype, shape in (*of_places, *self._layout(n_tokens))]
            n_bytes = len(head) + sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout)
            beside = data[n_bytes:]
            is_whole = len(data) >= n_bytes and (not beside or beside.startswith(_BESIDE))
            if data[: len(head)] != head or not is_whole:
                raise ModelFormatError(
                    f"the saved state ({len(data)} bytes) is not one of {n_tokens} tokens of this model with these "
                    "options; evaluate the tokens again"
                )
            arrays, offset = [], len(head)
            for dtype, shape in layout:
                arrays.append(np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape))
                offset += arrays[-1].nbytes
            places = arrays.pop(0) if of_places else None
            self.state.restore(n_tokens, self._take(arrays, n_tokens), places)
            self._take_beside(beside[len(_BESIDE) :], n_tokens)

    def _marked_beside(self, n: int) -> bytes:
        data = self._beside(n)
        return _BESIDE + data if data else b""

    def _beside(self, n: int) -> bytes:
        """Return what a session knows of the first `n` tokens beside keys and values, and can do without."""
        return b"" if self.follower is None else self.follower.saved(n)

    def _take_beside(self, data: bytes, n: int) -> None:
        """Take what _beside() returned; b"" where there is nothing."""
        if self.follower is not None:
            self.follower.restore(data, n)

    def _check_length(self, n_tokens: int) -> None:
        """Raise ModelFormatError where a saved state holds more tokens than the session can."""
        if not 0 <= n_tokens <= self.n_ctx:
            raise ModelFormatError(
                f"the saved state holds {n_tokens} tokens, the session {self.n_ctx}; open a longer session"
            )

    def _arrays(self, n: int) -> Sequence[NDArray[Any]]:
        """Return what save() writes of the first `n` tokens."""
        raise NotImplementedError

    def _layout(self, n: int) -> Iterable[tuple[Any, tuple[int, ...]]]:
        """Return type and shape of what save() writes of `n` tokens, whatever the session holds."""
        return [(array.dtype, array.shape) for array in self._arrays(n)]

    def _take(self, arrays: Sequence[NDArray[Any]], n: int) -> NDArray[np.bool_] | Literal[True]:
        """Put saved arrays of `n` tokens in their places; return which layers have written them, bool[n_layer, n]."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Stop the forward that is running, from any thread; without one, nothing happens."""
        self._model.cancel(self)

    def close(self) -> None:
        """Free the KV cache; calling it again, or in a forked process, does nothing."""
        if self._model.lock.is_ours:
            with self._model.lock.threads:
                if not self.state.is_closed:
                    self._free()
                self.state.close()

    @abstractmethod
    def _free(self) -> None:
        """Free the keys and values."""

    def _head(self, n_tokens: int) -> bytes:
        """Return what a saved state begins with: model and scales of adapters, and how many tokens follow."""
        return _HEAD.pack(self.mark, n_tokens)

    @property
    def mark(self) -> bytes:
        """What the keys and values of a text depend on: the model's fingerprint, and the scales of adapters."""
        mark = self._model.card.fingerprint.encode()
        if any(self._scales):
            mark = sha256(mark + np.array(self._scales, "<f4").tobytes()).hexdigest().encode()
        return mark
