"""What drafting can do without when memory runs short, and in which order: what is missed least goes first.

1. What the suffix drafter keeps of earlier texts; it goes on with the present text, which brings most of the gain.
2. The tables of n-grams, one after the other, each with its drafter.
3. The common text, with its drafter.
4. The drafters of other packages.
5. Most of the draft model's KV cache: the draft model goes on with a window of 256 tokens.
6. The draft model.
7. The draft head: its weights, and what it knows of the texts of all sessions.
8. The suffix drafter itself.

What is shed stays away from later requests, too, and their statistics say so: memory that was short once will be short
again. Engine.forget() brings everything back but the draft model, its window and the draft head; those come back with
the next load.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Protocol, runtime_checkable

from edgedec.drafter import DrafterFactory, LoadedDraftModel, ModelFactory
from edgedec.drafter_traits import Shedding
from edgedec.drafters.suffix.suffix import SuffixStore
from edgedec.errors import EdgedecError
from edgedec.head_state import HeadState
from edgedec.memory.system import held_reader
from edgedec.memory.watch import Shedder, Watch
from edgedec.scheduler.drafter_factories import CASCADE, COMMON, HEAD, SUFFIX
from edgedec.scheduler.drafter_set import Drafting

_WINDOW, _MODEL, _HEAD = 50, 60, 70
"""Places, among those that drafters declare (Shedding.order), of what draft models and heads lose."""


@runtime_checkable
class _Sized(Protocol):
    def memory_bytes(self) -> int:
        """Return the bytes of memory that it holds."""


def memory_watch(
    drafting: Drafting | None, cap_bytes: int | None, processes: Callable[[], Sequence[int]] = tuple
) -> Watch:
    """Return the watch over an engine's memory, for generate.SessionSlot.

    Args:
        drafting: What the engine drafts with; None where it decodes plainly.
        cap_bytes: Most bytes of resident memory that the process may hold, those before loading included; None to shed
            only where the whole system is short of memory.
        processes: Returns the further processes that belong to the engine's models; what they hold counts.
    """
    return Watch(cap_bytes, shedders(drafting) if drafting is not None else (), held_reader(processes))


def shedders(drafting: Drafting) -> list[Shedder]:
    """Return the parts of the drafting that can be shed, in the order of the module's docstring.

    A part is shed between two steps of a generation, by its thread, or while no generation runs.
    """
    found: list[tuple[int, Shedder]] = []
    if {SUFFIX, CASCADE} & set(drafting.factories):
        found.append((0, _suffix_store(drafting)))
    for name, factory in drafting.factories.items():
        if (shedding := _shedding(factory)) is not None:
            found.append((shedding.order, _drafter(drafting, name, shedding.what.replace("{name}", name))))
    for source, users in _draft_models(drafting):
        found += [(_WINDOW, _window(drafting, source, users)), (_MODEL, _model(drafting, source, users))]
    if drafting.head is not None:
        found.append((_HEAD, _head(drafting, drafting.head)))
    return [shedder for _, shedder in sorted(found, key=itemgetter(0))]


def _shedding(factory: DrafterFactory) -> Shedding | None:
    """Return what a drafter declares to lose; nothing of its own where its memory is a draft model's."""
    found = getattr(factory, "shedding", None if isinstance(factory, ModelFactory) else Shedding())
    return found if isinstance(found, Shedding) else None


def _suffix_store(drafting: Drafting) -> Shedder:
    def stores() -> list[SuffixStore]:
        kept = (drafting.store.get(SUFFIX), drafting.store.get(CASCADE, {}).get(SUFFIX))
        return [store for store in kept if isinstance(store, SuffixStore) and not store.shut]

    def shed() -> None:
        with drafting.lock:
            for store in stores():
                store.shed()

    return Shedder("the suffix store", lambda: sum(store.memory_bytes() for store in stores()), shed)


def _drafter(drafting: Drafting, name: str, what: str) -> Shedder:
    """Return the shedder of a drafter with all that it keeps."""

    def held() -> int:
        if name in drafting.off:
            return 0
        drafters = [policy.drafters.get(name) for policy in [*drafting.policies]]
        kept = drafting.common if name == COMMON else drafting.store.get(name)
        try:
            return max((part.memory_bytes() for part in (*drafters, kept) if isinstance(part, _Sized)), default=0)
        except Exception:  # a drafter of another package never ends a generation
            return 0

    def shed() -> None:
        drafting.switch_off(name, f"{name} off: {what} was shed when memory ran short; forget() brings it back")
        if name == COMMON and drafting.common is not None:
            drafting.common.shed()
        elif name != SUFFIX:  # the suffix store is empty by now, except for what is still to be written to a file
            drafting.store.pop(name, None)

    return Shedder(what, held, shed)


def _draft_models(drafting: Drafting) -> list[tuple[LoadedDraftModel, list[str]]]:
    """Return the loaded draft models, each with the names of the drafters that use it."""
    found: dict[int, tuple[LoadedDraftModel, list[str]]] = {}
    for name, factory in drafting.factories.items():
        if isinstance(factory, ModelFactory):
            found.setdefault(id(factory.source), (factory.source, []))[1].append(name)
    return list(found.values())


def _window(drafting: Drafting, source: LoadedDraftModel, names: list[str]) -> Shedder:
    from edgedec.drafters.draft_model.model import SMALL_WINDOW

    def held() -> int:
        n_ctx = source.n_ctx
        if n_ctx <= SMALL_WINDOW or names[0] in drafting.off:
            return 0
        return source.held_bytes()[1] * (n_ctx - SMALL_WINDOW) // n_ctx

    def shed() -> None:
        try:
            source.shrink()
        except EdgedecError:  # memory is so short that not even the small KV cache can be had
            _close(drafting, source, names)

    return Shedder("most of the draft model's KV cache", held, shed)


def _model(drafting: Drafting, source: LoadedDraftModel, names: list[str]) -> Shedder:
    def held() -> int:
        return 0 if names[0] in drafting.off else source.held_bytes()[0]

    return Shedder("the draft model", held, lambda: _close(drafting, source, names))


def _head(drafting: Drafting, head: HeadState) -> Shedder:
    from edgedec.drafters.head import SHED

    def held() -> int:
        return 0 if head.gone else head.held_bytes

    def shed() -> None:
        drafting.switch_off(HEAD, f"{HEAD} off: {SHED}")
        head.let_go()

    return Shedder("the draft head", held, shed)


def _close(drafting: Drafting, source: LoadedDraftModel, names: list[str]) -> None:
    for name in names:
        drafting.switch_off(name, f"{name} off: the draft model was shed when memory ran short; load again to have it")
        drafting.store.pop(name, None)
    source.close()
