"""What a text does when what runs the model is lost: it waits, and tries again to load the model and to go on."""

import logging
import math
from time import monotonic, sleep

from edgedec.errors import OptionError, RuntimeLostError
from edgedec.progress import CancelToken, OnProgress, report_progress

logger = logging.getLogger("edgedec.decoding.lost")
_PAUSE_S = 1.0
_POLL_S = 0.05
_PHASE = "waiting for the model's machines"


def require_wait(name: str, seconds: float) -> None:
    """Raise OptionError unless the option `name` is a time to wait: 0 or more seconds, infinity included."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or math.isnan(seconds) or seconds < 0:
        raise OptionError(name, seconds, "it must be 0 or more seconds; inf waits for ever")


class Waiting:
    """The waiting of one text. The time counts from a loss to the next step that succeeds."""

    def __init__(self, wait_s: float, cancel: CancelToken, on_progress: OnProgress | None) -> None:
        """`wait_s` is the most seconds to wait after a loss; `cancel` ends a pause."""
        self._wait_s, self._cancel, self._on_progress = wait_s, cancel, on_progress
        self._first: RuntimeLostError | None = None
        self._since = 0.0

    def pause(self, error: RuntimeLostError) -> None:
        """Wait a moment before the next try to go on.

        Raises:
            RuntimeLostError: The time is over. Where there was time, the error says what was lost at first, and what
                is missing now.
        """
        if self._cancel.cancelled:
            return
        if self._wait_s <= 0:
            raise error
        if self._first is None:
            self._first, self._since = error, monotonic()
            logger.warning("%s", self._sentence(error))
            report_progress(self._on_progress, _PHASE, 0, None, "")
            return  # the first try comes at once: a server may have been started again by a supervisor
        if monotonic() - self._since >= self._wait_s:
            now = "" if error.loss == self._first.loss else f"; now: {error.loss}"
            raise RuntimeLostError(f"{self._first.loss}; {self._wait_s:g} s were waited in vain{now}") from error
        until = min(self._since + self._wait_s, monotonic() + _PAUSE_S)
        while not self._cancel.cancelled and monotonic() < until:
            sleep(_POLL_S)

    def over(self) -> None:
        """Note that the model is back."""
        if self._first is not None:
            self._first = None
            self._end()
            logger.warning("the model is loaded again; the text goes on")

    def _sentence(self, error: RuntimeLostError) -> str:
        limit = "" if math.isinf(self._wait_s) else f" up to {self._wait_s:g} s"
        return f"{error.loss}; waiting{limit} until the model can be loaded again, then the text goes on"

    def _end(self) -> None:
        report_progress(self._on_progress, _PHASE, 1, 1, "")
