"""The process that decodes and encodes pictures: started when it is needed, and ended when it has rested."""

import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from edgedec.errors import RuntimeLostError
from edgedec.progress import CancelToken, OnProgress, check_cancelled
from edgedec_runtimes.child.process import Child

_CALLS = "edgedec_runtimes.pictures.calls:PictureCalls"
# glibc hands out zeros then. libmtmd multiplies memory that nothing was written to by 0.0 (rows of [IMG_BREAK] of
# pixtral), so what lay there before could make rows that are no numbers.
_ZEROS = {"MALLOC_PERTURB_": "255"}
_SHORT = frozenset({"decoder", "encoder", "layout", "measure"})
IDLE_S = 60.0


class PictureChild:
    """A process for pictures, which may not run; any thread may ask it."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._n_asking = 0
        self._timer: threading.Timer | None = None
        self._is_closed = False

    @property
    def processes(self) -> tuple[int, ...]:
        """The process, where it runs; see edgedec.runtime.HasProcesses."""
        child = self._child
        return () if child is None or child.ending is not None else (child.pid,)

    def ask(
        self,
        method: str,
        *arguments: Any,
        cancel: CancelToken | None = None,
        on_progress: OnProgress | None = None,
        patience_s: float = math.inf,
    ) -> Any:
        """Call a method of PictureCalls and return what it returns.

        `cancel` ends the process, which no other way would stop, and so do `patience_s` seconds without an answer; the
        next call starts it again. A short call that was lost is made once more: what ran beside it may have ended the
        process.

        Raises:
            EdgedecError: What the method raised.
            CancelledError: `cancel` was cancelled.
            RuntimeLostError: The process ended, such as by a check of its library; the next call starts it again.
        """
        check_cancelled(cancel, "reading pictures")
        for is_last in (method not in _SHORT, True):
            child = self._taken()
            try:
                with cancel.calling(child.kill) if cancel is not None else nullcontext():
                    return child.ask(method, *arguments, on_progress=on_progress, patience_s=patience_s).value
            except RuntimeLostError as error:
                check_cancelled(cancel, "reading pictures")
                if is_last:
                    why = f"the process that reads pictures was lost ({error.marked})"
                    raise RuntimeLostError(why, "ask again, or with another picture") from None
            finally:
                self._given_back()
        raise AssertionError("the last call returns or raises")

    def close(self) -> None:
        """End the process; a later call raises RuntimeLostError."""
        with self._lock:
            self._is_closed = True
        self._end(lambda: True)

    def _taken(self) -> Child:
        with self._lock:
            if self._is_closed:
                raise RuntimeLostError("the model was closed", "load it again")
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._child is None or self._child.ending is not None:
                self._child = Child(_CALLS, **_ZEROS)
            self._n_asking += 1
            return self._child

    def _given_back(self) -> None:
        with self._lock:
            self._n_asking -= 1
            if not self._n_asking and not self._is_closed:
                self._timer = timer = threading.Timer(self._idle_s, self._end, (lambda: not self._n_asking,))
                timer.daemon = True
                timer.start()

    def _end(self, may_end: Callable[[], bool]) -> None:
        with self._lock:
            if not may_end():
                return
            child, self._child = self._child, None
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if child is not None:
            child.end()
