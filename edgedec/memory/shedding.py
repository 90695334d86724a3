"""Shedding: what drafting does without where memory runs short while text is generated; the text stays the same.

What is missed least goes first: what drafters keep of earlier texts and can do without, then each drafter with all that
it holds, in the order that the drafters declare (edgedec.drafter_traits.Shedding). Of a draft model, most of its KV
cache goes before it does.

What is shed stays away from later requests, too, and their statistics say so: memory that was short once will be short
again. Engine.forget() brings everything back but the models, which come back with the next load.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from time import monotonic
from typing import Protocol, runtime_checkable

from edgedec.drafter import LoadedDraftModel, ModelFactory
from edgedec.drafter_traits import Sheddable, Shedding, shedding_of
from edgedec.errors import EdgedecError
from edgedec.memory import system
from edgedec.memory_plan import format_bytes
from edgedec.scheduler.drafter_set import Drafting

_EVERY_S = 0.25
_PRESSURE_EVERY_S = 2.0  # the kernel renews its averages as often
_AFTER_PRESSURE_S = 10.0  # the average is over 10 s: until then it also covers the time before the shedding
_PRESSURE_PERCENT = 20.0
_LEAST_AVAILABLE = 0.05
_WORTH_BYTES = 256_000
_STORES, _WINDOW, _MODEL = 0, 50, 60
"""Places, among those that drafters declare (Shedding.order), of stores and of what draft models lose."""


@dataclass(frozen=True, slots=True)
class Shedder:
    """A part of the drafting that can be shed.

    Attributes:
        name: The part's name, for a person ("the suffix store").
        held: Returns the bytes that shedding the part would free; 0 once the part is shed.
        shed: Drops the part, for good.
    """

    name: str
    held: Callable[[], int]
    shed: Callable[[], None]


def margin_bytes(cap_bytes: int) -> int:
    """Return how many bytes below a cap shedding begins: 2 % of the cap, at most 8 MB. A plan leaves as much free.

    >>> margin_bytes(900_000_000), margin_bytes(100_000_000)
    (8000000, 2000000)
    """
    return min(cap_bytes // 50, 8_000_000)


class Watch:
    """Reads what the process holds, at most four times a second, and sheds at most one part at each reading.

    A part is shed when the process comes within `margin_bytes` of its cap, and at the next reading another one if the
    process is still there. A part is also shed when the system is short of memory (`shortage`), which is looked at
    every 2 s, and after a shedding only 10 s later, as the system's figure is an average over 10 s. A part that holds
    less than `worth_bytes` stays: shedding it would slow down the text for nothing.

    Freed memory is given back to the system before a shedding, as that may be enough, and after it; once more
    at the next reading, as the step between frees memory, too.

    Args:
        cap_bytes: Most bytes of resident memory that the process may hold; None to look at the system only.
        shedders: The parts, the least missed first.
        read: Returns the bytes that the process holds, with those of processes that belong to its model, or None where
            unknown; called from the generating thread.
        pressure: Returns why the system is short of memory, or None where it is not.
        clock: Returns seconds, monotonic.
        worth_bytes: The fewest bytes that are worth a shedding.
    """

    def __init__(
        self,
        cap_bytes: int | None,
        shedders: Sequence[Shedder],
        read: Callable[[], int | None] | None = None,
        pressure: Callable[[], str | None] | None = None,
        *,
        clock: Callable[[], float] = monotonic,
        worth_bytes: int = _WORTH_BYTES,
    ) -> None:
        self._cap_bytes = cap_bytes
        self._shedders = tuple(shedders)
        self._read = read or system.resident_reader()
        self._pressure = pressure or shortage_reader()
        self._clock = clock
        self._worth_bytes = worth_bytes
        self._next_s = self._next_pressure_s = float("-inf")
        self._has_shed = self._is_reported = False

    def check(self) -> list[str]:
        """Shed a part if memory is short; return the sentences for the statistics, mostly none."""
        now = self._clock()
        if now < self._next_s:
            return []
        self._next_s = now + _EVERY_S
        if self._has_shed:
            give_back()
            self._has_shed = False
        why = self._too_much()
        if why is not None and self._worth_shedding() is not None:
            give_back()  # memory that an earlier text took, and has freed since, is no reason to shed
            why = self._too_much()
        if why is not None:
            sentence = self._shed(why)
            if sentence is None and not self._is_reported:
                self._is_reported = True
                sentence = f"{why}, and nothing is left to shed"
        else:
            self._is_reported = False
            sentence = self._relieve_system(now)
        return [] if sentence is None else [sentence]

    def _too_much(self) -> str | None:
        if self._cap_bytes is None:
            return None
        held = self._read()
        if held is None or held < self._cap_bytes - margin_bytes(self._cap_bytes):
            return None
        return f"the process holds {format_bytes(held)} of {format_bytes(self._cap_bytes)}"

    def _relieve_system(self, now: float) -> str | None:
        if now < self._next_pressure_s:
            return None
        why = self._pressure()
        sentence = None if why is None else self._shed(why)
        self._next_pressure_s = now + (_PRESSURE_EVERY_S if sentence is None else _AFTER_PRESSURE_S)
        return sentence

    def _shed(self, why: str) -> str | None:
        """Shed the first part that is worth it, and return a sentence on it; None where no part is."""
        sheddable = self._worth_shedding()
        if sheddable is None:
            return None
        shedder, held = sheddable
        shedder.shed()
        give_back()
        self._has_shed = True
        return f"shed {shedder.name} ({format_bytes(held)}): {why}"

    def _worth_shedding(self) -> tuple[Shedder, int] | None:
        """Return the first part that holds enough, and its bytes; None where no part does."""
        for shedder in self._shedders:
            held = shedder.held()
            if held >= max(1, self._worth_bytes):
                return shedder, held
        return None


def give_back() -> None:
    """Give freed memory back to the system, after a garbage collection.

    Python keeps some freed dictionaries until a collection, and each of them holds back 1 MB of the heap: of the 23 MB
    that a suffix automaton of 60,000 tokens had held, 15 to 22 MB were given back only after a collection.
    """
    gc.collect()
    system.return_free_memory()


def shortage_reader() -> Callable[[], str | None]:
    """Return a function that returns a sentence while the system is short of memory, else None.

    The system is short where something waited for memory in more than 20 % of the last 10 s and less than 5 % is
    available. One of the two alone says little: file caches are given up late, and a process at the limit of its own
    control group waits without anybody else being short. Only Linux reports how long something waited.
    """
    waited = system.pressure_reader()

    def read() -> str | None:
        percent = waited()
        if percent is None or percent <= _PRESSURE_PERCENT:  # mostly; reading the rest takes 50 times as long
            return None
        limits = filter(None, (system.total_bytes(), system.cgroup_limit_bytes()))
        return shortage(percent, system.available_bytes(), min(limits, default=None))

    return read


def shortage(percent: float, available_bytes: int | None, total_bytes: int | None) -> str | None:
    """Return a sentence where the system is short of memory, else None.

    Args:
        percent: Share of the last 10 s in which something waited for memory, in percent.
        available_bytes: Bytes that could still be taken without swapping; None where unknown.
        total_bytes: Bytes of all memory; None where unknown.

    >>> shortage(34.0, 200_000_000, 8_000_000_000)
    'the system has 200.0 MB of 8000.0 MB left and waited for memory in 34 % of the last 10 s'
    >>> shortage(34.0, 800_000_000, 8_000_000_000)
    """
    if percent <= _PRESSURE_PERCENT or available_bytes is None or total_bytes is None:
        return None
    if available_bytes >= _LEAST_AVAILABLE * total_bytes:
        return None
    left, whole = format_bytes(available_bytes), format_bytes(total_bytes)
    return f"the system has {left} of {whole} left and waited for memory in {percent:.0f} % of the last 10 s"


@runtime_checkable
class _Sized(Protocol):
    def memory_bytes(self) -> int:
        """Return the bytes of memory that it holds."""


def shedders(drafting: Drafting) -> list[Shedder]:
    """Return the parts of the drafting that can be shed, in the order of the module's docstring.

    A part is shed between two steps of a generation, by its thread, or while no generation runs.
    """
    parts: list[tuple[int, Shedder]] = []
    spared: dict[str, list[str]] = {}
    users: dict[int, tuple[LoadedDraftModel, list[str]]] = {}
    for name, factory in drafting.factories.items():
        if isinstance(factory, ModelFactory):
            users.setdefault(id(factory.source), (factory.source, []))[1].append(name)
        if (shedding := shedding_of(factory)) is None:
            continue
        if shedding.spared:
            spared.setdefault(shedding.spared, []).append(name)
        if not isinstance(factory, ModelFactory):
            parts.append((shedding.order, _drafter(drafting, name, shedding)))
    parts += [(_STORES, _spared(drafting, what, names)) for what, names in spared.items()]
    for source, names in users.values():
        parts += _of_model(drafting, source, names)
    return [shedder for _, shedder in sorted(parts, key=itemgetter(0))]


def _spared(drafting: Drafting, what: str, names: Sequence[str]) -> Shedder:
    """Return the shedder of the stores of these drafters, which go on without them."""

    def stores() -> list[Sheddable]:
        drafting_stores = [drafting.store.get(name) for name in names]
        within = [part for each in drafting_stores for part in (each.values() if isinstance(each, dict) else [each])]
        return [part for part in within if isinstance(part, Sheddable)]

    def shed() -> None:
        with drafting.store.lock:
            for store in stores():
                store.shed()

    return Shedder(what, lambda: sum(store.memory_bytes() for store in stores()), shed)


def _drafter(drafting: Drafting, name: str, shedding: Shedding) -> Shedder:
    """Return the shedder of a drafter with all that it keeps."""
    what, factory = shedding.what.replace("{name}", name), drafting.factories[name]
    remedy = "forget() brings it back" if shedding.returns else "load again to have it"

    def held() -> int:
        if name in drafting.off:
            return 0
        drafters = [policy.drafters.get(name) for policy in [*drafting.policies]]
        shared = factory if isinstance(factory, Sheddable) else None
        parts = (*drafters, drafting.store.get(name), shared)
        try:
            return max((part.memory_bytes() for part in parts if isinstance(part, _Sized)), default=0)
        except Exception:  # a drafter of another package never ends a generation
            return 0

    def shed() -> None:
        drafting.switch_off(name, f"{name} off: {what} was shed when memory ran short; {remedy}")
        if isinstance(factory, Sheddable):
            factory.shed()
        if not shedding.spared:  # such a store is empty by now, except for what is still to be written to a file
            drafting.store.pop(name, None)

    return Shedder(what, held, shed)


def _of_model(drafting: Drafting, source: LoadedDraftModel, names: Sequence[str]) -> list[tuple[int, Shedder]]:
    """Return the shedders of a draft model that these drafters use: of most of its KV cache, and of all of it."""

    def close() -> None:
        for name in names:
            why = f"{name} off: the draft model was shed when memory ran short; load again to have it"
            drafting.switch_off(name, why)
            drafting.store.pop(name, None)
        source.close()

    def shrink() -> None:
        try:
            source.shrink()
        except EdgedecError:  # memory is so short that not even the small KV cache can be had
            close()

    def held(n_bytes: Callable[[], int]) -> Callable[[], int]:
        return lambda: 0 if names[0] in drafting.off else n_bytes()

    window = Shedder("most of the draft model's KV cache", held(source.spare_bytes), shrink)
    return [(_WINDOW, window), (_MODEL, Shedder("the draft model", held(lambda: source.held_bytes()[0]), close))]
