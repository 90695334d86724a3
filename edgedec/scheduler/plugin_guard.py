"""A drafter from a plug-in, run in a thread of its own: late or failing, it never holds up the text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import EMPTY_DRAFT, Draft, Draws, Verification
from edgedec.draft_constants import SURE
from edgedec.drafter import DraftContext, Drafter, DrafterFactory, DrafterNeeds, DraftLateError
from edgedec.drafter_traits import (
    Declaring,
    Demands,
    DrafterTraits,
    Following,
    FollowingFactory,
    Opening,
    Shedding,
    demands_of,
    shedding_of,
)
from edgedec.errors import EdgedecError, PluginError
from edgedec.load_plan import LoadPlan
from edgedec.model import Session

_MAKING_S = 2.0  # that a constructor may take: the first token waits for it


class Guarded:
    """Implements edgedec.drafter.Drafter by passing every call on to a worker thread, in order.

    A draft that has not come by its deadline is left out; the third late draft in a row makes propose() raise, and so
    does an error of the drafter.

    Args:
        make: Makes the drafter, in the worker thread too.

    Attributes:
        needs: What the drafter said that it needs of the target, when it was made.
        traits: What the drafter declared then.
        followed_s: Seconds that the drafter had read the text along, as it said after the latest step that it took.

    Raises:
        PluginError: Making the drafter took over two seconds.
        Exception: What making it raised.
    """

    def __init__(self, make: Callable[[], Drafter]) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # number of the question, answer or error
        self._n_asked = self._misses = 0
        self._failure: Exception | None = None
        self._following: Following | None = None
        self.followed_s = 0.0

        def made() -> tuple[DrafterNeeds, DrafterTraits, int]:
            self._drafter = drafter = make()
            traits = drafter.traits if isinstance(drafter, Declaring) else DrafterTraits(draws=Draws.UNKNOWN)
            if not isinstance(traits, DrafterTraits):
                raise PluginError(
                    f"its traits are {type(traits).__name__}; they must be edgedec.drafter_traits.DrafterTraits"
                )
            if traits.follows:
                if not isinstance(drafter, Following):
                    raise PluginError("it follows texts; it must have what edgedec.drafter_traits.Following says")
                self._following = drafter
            return drafter.needs, traits, drafter.memory_bytes()

        Thread(target=self._run, name="edgedec-drafter", daemon=True).start()
        try:
            answer: tuple[DrafterNeeds, DrafterTraits, int] = self._answer(made, monotonic() + _MAKING_S)
            self.needs, self.traits, self._held_bytes = answer
        except BaseException as error:  # Ctrl-C too
            self.close()
            if isinstance(error, Empty):
                raise PluginError(f"its constructor took over {_MAKING_S:.0f} s; it must return sooner") from None
            raise

    def begin(self, token_ids: Sequence[int]) -> None:
        """Pass the prompt on."""
        prompt = tuple(token_ids)
        self._work.put(lambda: self._drafter.begin(prompt))

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Return the draft if it comes in time.

        Raises:
            DraftLateError: It does not; the third in a row is the last.
            Exception: What the drafter raised, now or before.
        """

        def drafted() -> Draft:  # once the deadline is over, nobody waits for the draft any more
            return EMPTY_DRAFT if monotonic() > deadline_s else self._drafter.propose(n_max, deadline_s)

        try:
            draft: Draft = self._answer(drafted, deadline_s)
        except Empty:
            self._missed()
        self._misses = 0
        return draft

    def _answer(self, question: Callable[[], object], deadline_s: float) -> Any:
        """Return what the worker thread finds out (Empty: not by the deadline; Exception: what a call raised)."""
        self._n_asked += 1
        asked = self._n_asked
        self._work.put(lambda: self._answers.put((asked, _outcome(question))))
        while True:
            number, answer = self._answers.get(timeout=max(0.0, deadline_s - monotonic()))
            if self._failure is not None:
                raise self._failure
            if isinstance(answer, Exception):
                raise answer
            if number == asked:
                return answer

    def _missed(self) -> NoReturn:
        if self._failure is not None:
            raise self._failure
        self._misses += 1
        if self._misses >= SURE:
            why = f"{SURE} drafts in a row came after their deadline; it must return sooner"
            raise DraftLateError(why, is_last=True)
        raise DraftLateError("the draft came after its deadline")

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Pass the outcome of a step on; the arrays are copied, as they are valid only until the next forward."""
        copies = {layer: states.copy() for layer, states in hidden.items()}

        def learn() -> None:
            self._drafter.learn(verification, copies)
            if self._following is not None:
                self.followed_s = float(self._following.followed_s)

        self._work.put(learn)

    def idle(self) -> None:
        """Tell a drafter that follows texts to leave this one alone."""
        if self._following is not None:
            self._work.put(self._following.idle)

    def memory_bytes(self) -> int:
        """Return the bytes that the drafter held when it was made, as it said then."""
        return self._held_bytes

    def close(self) -> None:
        """End the thread as soon as it has done what was passed on before."""
        self._work.put(None)

    def _run(self) -> None:
        while (act := self._work.get()) is not None:
            outcome = _outcome(act)
            if isinstance(outcome, Exception):
                self._failure = outcome


def _outcome(act: Callable[[], object]) -> object:
    """Return what a call returned or raised; a drafter that calls exit() gives an error, so it ends only itself."""
    try:
        return act()
    except Exception as error:
        return error
    except BaseException as error:
        return PluginError(f"it raised {type(error).__name__}")


@dataclass(slots=True)
class GuardedFactory:
    """A factory whose drafters are made and run in threads of their own.

    Attributes:
        factory: Makes these drafters.
        shedding: What it declares that they lose where memory runs short.
        demands: What it declares that they need when the model is loaded.
    """

    factory: DrafterFactory
    shedding: Shedding | None = field(init=False)
    demands: Demands = field(init=False)
    _making: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.shedding, self.demands = shedding_of(self.factory), demands_of(self.factory)

    def __call__(self, context: DraftContext) -> Drafter:
        """Make a drafter (raises what Guarded raises)."""
        if self._making.locked():  # else every text would wait for it, and leave a thread behind
            raise PluginError("its constructor, called for an earlier text, has not returned yet")

        def made() -> Drafter:
            with self._making:
                return self.factory(context)

        return Guarded(made)

    def opened(self, session: Session, plan: LoadPlan) -> DrafterFactory | None:
        """Return the factory with what it makes of a loaded target, guarded too (raises what Opening says)."""
        if not isinstance(self.factory, Opening):
            return self
        made = _outcome(partial(self.factory.opened, session, plan))
        if isinstance(made, Exception):
            raise made if isinstance(made, EdgedecError) else PluginError(f"{type(made).__name__}: {made}") from made
        return None if made is None else GuardedFactory(cast(DrafterFactory, made))

    def begin_prompt(self, session: Session, *, follows: bool) -> None:
        """Tell the factory of a prompt that several texts share, where it follows texts; at most two seconds pass."""
        factory = self.factory
        if isinstance(factory, FollowingFactory):
            thread = Thread(
                target=_outcome, args=[partial(factory.begin_prompt, session, follows=follows)], daemon=True
            )
            thread.start()
            thread.join(_MAKING_S)
