"""The watch over memory while text is generated: before it runs short, what can be done without is shed.

What is shed is what drafts are made with, never what the text depends on: the text stays the same, and takes longer.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from edgedec.memory import system as system_memory
from edgedec.memory_plan import format_bytes

_EVERY_S = 0.25
_PRESSURE_EVERY_S = 2.0  # the kernel renews its averages no sooner
_AFTER_PRESSURE_S = 10.0  # what that average looks back on: until then it speaks of what was before the shedding
_PRESSURE_PERCENT = 20.0
_LEAST_AVAILABLE = 0.05
_WORTH_BYTES = 256_000


@dataclass(frozen=True, slots=True)
class Shedder:
    """Something that can be done without.

    Attributes:
        name: What it is, for a person ("the suffix store").
        held: Tells the bytes that shedding it would free; 0 once it was shed.
        shed: Drops it, for good.
    """

    name: str
    held: Callable[[], int]
    shed: Callable[[], None]


def margin_bytes(cap_bytes: int) -> int:
    """Return how far below a cap shedding begins: 2 % of it, at most 8 MB; a plan leaves as much free.

    >>> margin_bytes(900_000_000), margin_bytes(100_000_000)
    (8000000, 2000000)
    """
    return min(cap_bytes // 50, 8_000_000)


class Watch:
    """Reads what the process holds, at most four times a second, and sheds one thing at a reading.

    It sheds when the process comes within `margin_bytes` of its cap, at the next reading again if it is still there;
    and when the system is short (`shortage`), looked at every two seconds and for ten seconds not again after shedding,
    as its figure is an average of ten seconds. What holds less than `worth_bytes` is not shed: it would slow down
    the text for nothing. Freed memory is given back to the system before shedding, which may be enough, once more when
    something was shed, and at the next reading what the step between let go of.

    Args:
        cap_bytes: Most that the process may hold, resident memory; None to look at the system only.
        shedders: What to shed, the least missed first.
        read: Tells what the process holds, in bytes, None where unknown; called from the generating thread.
        pressure: Tells why the system is short of memory, None where it is not.
        clock: Seconds, monotonic.
        worth_bytes: Least that is worth shedding.
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
        self._read = read or system_memory.resident_reader()
        self._pressure = pressure or shortage_reader()
        self._clock = clock
        self._worth_bytes = worth_bytes
        self._next_s = self._next_pressure_s = float("-inf")
        self._has_shed = self._told = False

    def check(self) -> list[str]:
        """Shed something if memory is short, and return what there is to tell of it; mostly nothing, in no time."""
        now = self._clock()
        if now < self._next_s:
            return []
        self._next_s = now + _EVERY_S
        if self._has_shed:
            give_back()
            self._has_shed = False
        why = self._too_much()
        if why is not None and self._worth_shedding() is not None:
            give_back()  # what a request's text took, and was freed since, is no reason to shed
            why = self._too_much()
        if why is not None:
            sentence = self._shed(why)
            if sentence is None and not self._told:
                self._told = True
                sentence = f"{why}, and nothing is left to shed"
        else:
            self._told = False
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
        """Drop the first thing that is worth it, and say so; None where there is none."""
        found = self._worth_shedding()
        if found is None:
            return None
        shedder, held = found
        shedder.shed()
        give_back()
        self._has_shed = True
        return f"shed {shedder.name} ({format_bytes(held)}): {why}"

    def _worth_shedding(self) -> tuple[Shedder, int] | None:
        """Return the first thing that holds enough, and how much; None where there is none."""
        for shedder in self._shedders:
            held = shedder.held()
            if held >= max(1, self._worth_bytes):
                return shedder, held
        return None


def give_back() -> None:
    """Give freed memory back to the system.

    Python keeps some freed dictionaries for later until a collection, and each keeps a piece of 1 MB from going: of the
    23 MB that a suffix automaton of 60,000 tokens had held, 15 to 22 MB went only then.
    """
    gc.collect()
    system_memory.return_free_memory()


def shortage_reader() -> Callable[[], str | None]:
    """Return what tells, in a sentence, that the system is short of memory, and None while it is not.

    It is where something waited for memory in more than 20 % of the last ten seconds and less than 5 % is available.
    Either alone says little: file caches are given up late, and a process at the limit of its own control group
    waits without anybody else being short. Only Linux tells how long something waited; elsewhere the answer is None.
    """
    waited = system_memory.pressure_reader()

    def read() -> str | None:
        percent = waited()
        if percent is None or percent <= _PRESSURE_PERCENT:  # mostly: reading the rest takes 50 times as long
            return None
        return shortage(percent, system_memory.available_bytes(), _most_bytes())

    return read


def _most_bytes() -> int | None:
    """Return what there is in all: the machine's memory, or the control group's limit."""
    limits = (system_memory.total_bytes(), system_memory.cgroup_limit_bytes())
    return min((n_bytes for n_bytes in limits if n_bytes is not None), default=None)


def shortage(percent: float, available_bytes: int | None, total_bytes: int | None) -> str | None:
    """Return a sentence where the system is short of memory.

    Args:
        percent: Share of the last 10 s in which something waited for memory.
        available_bytes: What could still be had without swapping; None where unknown.
        total_bytes: What there is in all; None where unknown.

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
