"""What a drafter and its factory declare of themselves; all of it may be left out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from edgedec.draft import Draws
from edgedec.drafter import DrafterFactory, ModelFactory
from edgedec.load_plan import LoadPlan
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Session


class DraftCost(Enum):
    """What each token of a drafter's drafts takes."""

    NOTHING = "next to nothing: the tokens are looked up"
    CALLS = "a call of a model that has read the text along with the target"
    MODEL = "a forward of a model that first has to read what it missed of the text"
    TARGET = "a forward of the target itself, through a part of its weights"


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """What a drafter declares of itself; the scheduler decides by it until drafts were timed and compared with texts.

    Attributes:
        cost: What each token of a draft takes.
        draws: What is drawn.
        rate: P(a node is accepted | its parent was accepted), as expected.
        level_s: Seconds that a draft is expected to take for each token deeper; None where that is not known.
        once_s: Seconds that it is expected to take beside that, whatever its depth.
        about: Returns the name and the memory of the model that the drafter uses, for a person; None without one.
        follows: Whether the drafter reads each text along with the target; it then has what `Following` says.
    """

    cost: DraftCost = DraftCost.NOTHING
    draws: Draws = Draws.NOTHING
    rate: float = 0.7
    level_s: float | None = None
    once_s: float = 0.0
    about: Callable[[], str] | None = None
    follows: bool = False


@runtime_checkable
class Declaring(Protocol):
    """A drafter that declares its traits; any other one looks tokens up, and does not say what it draws."""

    @property
    def traits(self) -> DrafterTraits:
        """What the scheduler should know, when the drafter was made."""


@runtime_checkable
class Following(Protocol):
    """A drafter that reads each text along with the target, which takes time also where it is not asked.

    Its traits say that it `follows`. While its drafts do not pay, it is told to leave whole texts alone.

    Attributes:
        followed_s: Seconds that reading has taken since begin(), drafts not included.
    """

    @property
    def followed_s(self) -> float: ...

    def idle(self) -> None:
        """Stop reading the text; the drafter is not asked before the next text."""


@runtime_checkable
class FollowingFactory(Protocol):
    """A factory whose drafters follow texts, and which is told of a prompt that several texts have in common."""

    def begin_prompt(self, session: Session, *, follows: bool) -> None:
        """Follow a prompt that the session is about to read, or leave it alone.

        The drafters of the texts are made later, on forks of the session.
        """


class Place(Enum):
    """Where down the ladder of a memory plan (docs/memory.md) a drafter is left out by itself."""

    FIRST = "before stores and drafts shrink: what takes much memory and gains little"
    BEFORE_KV_TYPES = "before the KV cache and the context shrink"
    LAST = "after these: what takes little"


@dataclass(frozen=True, slots=True)
class Demands:
    """What a drafter needs when the model is loaded.

    Attributes:
        rows: The fewest rows of a forward that the drafter can do with; a memory plan keeps that many.
        costs: Whether the drafter decides by what forwards cost, so that they are measured even where it is pinned.
        layers: Whether the drafter runs the target with layers left out, which a model of fewer layers can't do.
        draft_model: Whether it drafts with a draft model, which load finds, plans and opens.
        head: Whether it drafts with a trained head, which the runtime plans and loads with the target.
        store_file: Whether it keeps its texts in load's file of earlier texts, where one is named.
        memory: Returns the terms of what the drafter holds beside these models and its store (Shedding.keeps_store),
            under a plan whose context is known. Drafters that return equal terms share what these stand for.
        place: Where a memory plan leaves the drafter out; None where it stays for as long as anything drafts.
        called: What is then left out, for a person ("draft model"); drafters of one such name go together.
    """

    rows: int = 1
    costs: bool = False
    layers: bool = False
    draft_model: bool = False
    head: bool = False
    store_file: bool = False
    memory: Callable[[LoadPlan], Sequence[MemoryTerm]] = lambda plan: ()
    place: Place | None = None
    called: str = ""


@dataclass(frozen=True, slots=True)
class Shedding:
    """What a drafter loses where memory runs short: its place, and all that it keeps.

    Attributes:
        order: Drafters with lower numbers lose it sooner; a drafter that declares nothing has the default.
        what: What is lost, for a person; `{name}` stands for the drafter's name.
        keeps_store: Whether the drafter keeps a store between requests, which grows up to drafter.STORE_BYTES: a
            memory plan has room for the store then, and smaller stores are one of the first things that it gives up.
        spared: What a store that is Sheddable is called for a person: it goes before all else, and the drafter goes on
            without it. Empty without such a store.
        returns: Whether Engine.forget() brings back what was lost; else the next load does.
    """

    order: int = 40
    what: str = "the drafter {name}"
    keeps_store: bool = False
    spared: str = ""
    returns: bool = True


@runtime_checkable
class Demanding(Protocol):
    """A factory of drafters that need something at load."""

    @property
    def demands(self) -> Demands:
        """What they need."""


@runtime_checkable
class Losing(Protocol):
    """A factory that says what its drafters lose where memory runs short."""

    @property
    def shedding(self) -> Shedding | None:
        """What that is; None where it holds next to nothing that it could lose."""


@runtime_checkable
class Sheddable(Protocol):
    """What holds memory that can be shed: an opened factory, or a store that its drafter can go on without."""

    def memory_bytes(self) -> int:
        """Return the bytes that it holds; 0 once they are shed."""

    def shed(self) -> None:
        """Drop them."""


@runtime_checkable
class Opening(Protocol):
    """A factory that has something to read or to make once the target is loaded: a text, the state of a head."""

    def opened(self, session: Session, plan: LoadPlan) -> DrafterFactory | None:
        """Return the factory that holds what was made, a Sheddable where that can be shed; None for no drafts.

        Args:
            session: The target's first session.
            plan: What is loaded.

        Raises:
            EdgedecError: Why the drafter can't draft, which the statistics of every text say; CancelledError ends load.
        """


def demands_of(factory: DrafterFactory) -> Demands:
    """Return what a drafter needs when the model is loaded; one that declares nothing needs nothing."""
    return factory.demands if isinstance(factory, Demanding) else Demands()


def shedding_of(factory: DrafterFactory) -> Shedding | None:
    """Return what a drafter frees where memory runs short: what it declares, else all; None beside a draft model."""
    if isinstance(factory, Losing):
        return factory.shedding
    return None if isinstance(factory, ModelFactory) else Shedding()


def keeps_store(factory: DrafterFactory) -> bool:
    """Return whether a drafter declares a store, which it keeps between requests."""
    return isinstance(factory, Losing) and factory.shedding is not None and factory.shedding.keeps_store
