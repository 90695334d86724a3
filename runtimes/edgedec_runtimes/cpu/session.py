"""One sequence's KV cache on the cpu runtime."""

import ctypes
import os
import weakref
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgedec.model import Forward, ForwardItem, LayerSet, Rows
from edgedec.progress import OnProgress
from edgedec_runtimes.cpu.library import Item, address, check, native
from edgedec_runtimes.shared.own_session import OwnSession

if TYPE_CHECKING:
    from edgedec_runtimes.cpu.model import CpuModel


class Step:
    """A forward of one token as the native library takes it, made once.

    Attributes:
        item: The description; n_past and the token are filled in for each step.
        token: int32[1].
        pointer: To the description.
    """

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self.token = np.zeros(1, np.int32)
        self._wanted = np.zeros(1, np.int32)
        self.item = Item(
            session=handle, n_rows=1, tokens=address(self.token), n_wanted=1, wanted=address(self._wanted), n_taps=0
        )
        self.pointer = ctypes.pointer(self.item)


class CpuSession(OwnSession["CpuModel"]):
    """Implements edgedec.model.Session.

    Attributes:
        step: The native description of its plain steps.
    """

    def __init__(self, model: "CpuModel", handle: ctypes.c_void_p, n_ctx: int) -> None:
        super().__init__(model, n_ctx)
        self._handle = handle
        self._finalizer = weakref.finalize(self, _free, handle, os.getpid())
        self._finalizer.atexit = False  # a daemon thread may be in a forward then
        self.step = Step(handle)

    @property
    def handle(self) -> ctypes.c_void_p:
        """The native session."""
        return self._handle

    def forward(
        self,
        tokens: NDArray[np.int32] | None = None,
        *,
        n_past: int,
        hidden: NDArray[np.float32] | None = None,
        resume_after: int | None = None,
        parents: NDArray[np.int32] | None = None,
        layers: LayerSet | None = None,
        rows: Rows = "last",
        taps: tuple[int, ...] = (),
        on_progress: OnProgress | None = None,
    ) -> Forward:
        """Evaluate new rows; see edgedec.model.Session."""
        if (
            type(tokens) is np.ndarray
            and tokens.shape == (1,)
            and tokens.dtype == np.int32
            and parents is None
            and layers is None
            and hidden is None
            and resume_after is None
            and taps == ()
            and type(rows) is str
            and rows in ("last", "all")
            and self.state.is_whole
        ):
            return self._model.step(self, tokens, n_past)
        item = ForwardItem(self, n_past, tokens, hidden, resume_after, parents, layers, rows, taps)
        return self.evaluate(item, on_progress)

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree and drop its other rows."""
        with self._model.exclusive():
            slots = self.state.leave_tree(rows)
            code = native().ec_session_move(self._handle, address(slots), len(slots), self.n_cached)
            check(code, "keeping a path")
            self.state.hold_path(slots)

    def fork(self) -> "CpuSession":
        """Open a second session; the pages of the cached prefix are shared until one of the two writes there."""
        with self._model.exclusive():
            self.state.check_settled("forked")
            handle = ctypes.c_void_p()
            check(native().ec_session_fork(self._handle, self.n_cached, ctypes.byref(handle)), "forking a session")
            twin = self._model.adopt(handle, self.n_ctx)
            twin.state.restore(self.n_cached, self.state.written[:, : self.n_cached])
            return twin

    def save(self) -> bytes:
        """Serialize the cached KV."""
        with self._model.exclusive():
            self.state.check_settled("saved")
            n = self.n_cached
            kv = np.empty(native().ec_session_saved_bytes(self._handle, n), np.uint8)
            check(native().ec_session_save(self._handle, n, address(kv), len(kv)), "saving a session")
            return self._saved_head(n) + self.state.written[:, :n].tobytes() + kv.tobytes()

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned; on an error the session is as it was."""
        with self._model.exclusive():
            self.state.check_open()
            self._check_saved_tokens(n_tokens)
            n_layer = self._model.card.n_layer
            kv_bytes = int(native().ec_session_saved_bytes(self._handle, n_tokens))
            n_flags = n_layer * n_tokens
            begin = self._saved_body(data, n_tokens, n_flags + kv_bytes)
            written = np.frombuffer(data, np.bool_, n_flags, begin).reshape(n_layer, n_tokens)
            kv = np.frombuffer(data, np.uint8, kv_bytes, begin + n_flags)
            check(native().ec_session_load(self._handle, n_tokens, address(kv), len(kv)), "restoring a session")
            self.state.restore(n_tokens, written)

    def cancel(self) -> None:
        """Stop the forward that is running; without one, nothing happens."""
        self._model.stop.cancel(self)

    def close(self) -> None:
        """Free the KV cache; calling it again does nothing."""
        with self._model.lock:
            self.state.close()
            self._finalizer()


def _free(handle: ctypes.c_void_p, pid: int) -> None:
    """Free native memory; a forked child leaves the parent's alone."""
    if os.getpid() == pid:
        native().ec_session_close(handle)
