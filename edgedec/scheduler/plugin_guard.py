"""A drafter of somebody else's, in a thread of its own: late or failing, it never holds up the text."""

from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import EMPTY_DRAFT, Draft, DraftContext, Drafter, DrafterFactory, DrafterNeeds, Verification
from edgedec.errors import PluginError

_MISSES = 3
_MAKING_S = 2.0  # that a constructor may take: the first token waits for it

_Made = tuple[Drafter, DrafterNeeds, int]


class Guarded:
    """Implements edgedec.draft.Drafter by passing everything on to a worker thread, in order.

    A draft that is not there by its deadline is left out; after three in a row draft() raises, as it does with what the
    drafter itself raised.

    Args:
        make: Makes the drafter, in the worker thread too.

    Attributes:
        n_late: Drafts that were not there by their deadline.

    Raises:
        PluginError: Making it took over two seconds.
        Exception: What making it raised.
    """

    def __init__(self, make: Callable[[], Drafter]) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._drafts: SimpleQueue[tuple[int, Draft | Exception]] = SimpleQueue()
        self._made: SimpleQueue[_Made | Exception] = SimpleQueue()
        self._asked = self._misses = self.n_late = 0
        self._failure: Exception | None = None
        thread = Thread(target=self._run, args=(make,), name="edgedec-drafter", daemon=True)
        thread.start()
        made: _Made | Exception
        try:
            made = self._made.get(timeout=_MAKING_S)
        except Empty:
            made = PluginError(f"its constructor took over {_MAKING_S:.0f} s; it must return sooner")
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if isinstance(made, Exception):
            self.close()
            raise made
        self._drafter, self._needs, self._held_bytes = made

    @property
    def needs(self) -> DrafterNeeds:
        """What the drafter asked of the target when it was made."""
        return self._needs

    def begin(self, token_ids: Sequence[int]) -> None:
        """Pass the prompt on."""
        prompt = tuple(token_ids)
        self._work.put(lambda: self._drafter.begin(prompt))

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Return the draft if it comes in time.

        Raises:
            PluginError: The third one in a row did not.
            Exception: What the drafter raised, now or before.
        """
        self._asked += 1
        asked = self._asked
        self._work.put(lambda: self._drafts.put((asked, self._drafted(n_max, deadline_s))))
        while True:
            try:
                number, draft = self._drafts.get(timeout=max(0.0, deadline_s - monotonic()))
            except Empty:
                return self._missed()
            if self._failure is not None:
                raise self._failure
            if isinstance(draft, Exception):
                raise draft
            if number == asked:
                self._misses = 0
                return draft

    def _drafted(self, n_max: int, deadline_s: float) -> Draft | Exception:
        if monotonic() > deadline_s:
            return EMPTY_DRAFT  # nobody waits any more
        try:
            return self._drafter.draft(n_max, deadline_s)
        except BaseException as error:
            return _exception(error)

    def _missed(self) -> Draft:
        if self._failure is not None:
            raise self._failure
        self.n_late += 1
        self._misses += 1
        if self._misses >= _MISSES:
            raise PluginError(f"{_MISSES} drafts in a row came after their deadline; it must return sooner")
        return EMPTY_DRAFT

    def accept(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Pass the outcome of a step on; the arrays are copied, as they hold only until the next forward."""
        copies = {layer: states.copy() for layer, states in hidden.items()}
        self._work.put(lambda: self._drafter.accept(verification, copies))

    def memory_bytes(self) -> int:
        """Return what the drafter said when it was made."""
        return self._held_bytes

    def close(self) -> None:
        """End the thread when it comes to it."""
        self._work.put(None)

    def _run(self, make: Callable[[], Drafter]) -> None:
        try:
            drafter = make()
            self._made.put((drafter, drafter.needs, drafter.memory_bytes()))
        except BaseException as error:
            self._made.put(_exception(error))
        while (act := self._work.get()) is not None:
            try:
                act()
            except BaseException as error:
                self._failure = _exception(error)


def _exception(error: BaseException) -> Exception:
    """Return what may be raised where the text is made: a drafter that exits ends itself, not the application."""
    return error if isinstance(error, Exception) else PluginError(f"it raised {type(error).__name__}")


def guarded(factory: DrafterFactory) -> DrafterFactory:
    """Return a factory whose drafters are made and run in threads of their own."""
    making = Lock()

    def make(context: DraftContext) -> Drafter:
        if making.locked():  # or every text would wait for it, and leave a thread behind
            raise PluginError("its constructor, called for an earlier text, has not returned yet")

        def made() -> Drafter:
            with making:
                return factory(context)

        return Guarded(made)

    return make
