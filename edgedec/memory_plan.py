"""The memory plan: the bytes that will be held, by name, against the bytes that are allowed.

MB is 10^6 bytes and MiB 2^20. Memory is held where the system counts it as resident: private pages, and the pages of
mapped files that are in memory (VmRSS and VmHWM on Linux, the working set on Windows, resident_size on macOS).
"""

import re
from dataclasses import dataclass

from edgedec.device import HOST
from edgedec.errors import MemoryCapError, RequestError

OTHER_MODELS = "other models"
"""The term of the models that are loaded already, where a cap is for all models together."""

_MOST_BYTES = 1 << 63
_SCALES = {"": 1000, "b": 1000, "ib": 1024}
_UNITS = {"": 1, "b": 1} | {f"{k}{end}": scale**n for n, k in enumerate("kmgt", 1) for end, scale in _SCALES.items()}


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """One line of a memory plan.

    Attributes:
        name: What holds the memory ("weights (mapped)", "KV cache", ...).
        n_bytes: Bytes that are held.
        detail: How the bytes are counted, for a person; may be empty.
        base: Whether the process held this before a model was loaded (interpreter, libraries, the application).
        partial: Whether more is held, of unknown size, as finding out takes more memory than there is. No plan with
            such a term fits.
        grows: Whether this is held only as texts fill it (a KV cache in pages, what drafters keep), or only kept free.
        device: The name of the device that holds it (edgedec.device.Device), or HOST.
    """

    name: str
    n_bytes: int
    detail: str = ""
    base: bool = False
    partial: bool = False
    grows: bool = False
    device: str = HOST


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The terms of a plan, and the cap that their sum must keep to.

    Attributes:
        terms: What will be held at the peak; none where nothing was planned.
        cap_bytes: The most bytes, or None for no cap.
        given_up: A phrase for each thing that was given up to fit.
        cap_name: Where the cap comes from: "allowed" by the user, or "free" on this machine.
    """

    terms: tuple[MemoryTerm, ...]
    cap_bytes: int | None = None
    given_up: tuple[str, ...] = ()
    cap_name: str = "allowed"

    @property
    def total_bytes(self) -> int:
        """The bytes of all terms."""
        return sum(term.n_bytes for term in self.terms)

    @property
    def start_bytes(self) -> int:
        """The bytes that are held with a short text: those of the terms that don't grow with texts."""
        return sum(term.n_bytes for term in self.terms if not term.grows)

    @property
    def own_bytes(self) -> int:
        """The bytes of the model itself: without those of the process, and of other models."""
        return sum(term.n_bytes for term in self.terms if not term.base and term.name != OTHER_MODELS)

    @property
    def process_cap_bytes(self) -> int | None:
        """The cap where it is for the whole process, else None."""
        return self.cap_bytes if any(term.base for term in self.terms) else None

    @property
    def fits(self) -> bool:
        """Whether the sum is known and not over the cap."""
        return self.cap_bytes is None or (not self.partial and self.total_bytes <= self.cap_bytes)

    @property
    def partial(self) -> bool:
        """Whether more is needed, of unknown size."""
        return any(term.partial for term in self.terms)

    def table(self) -> str:
        """Return the plan as plain text, one line for each term."""
        rows = [(term.name, format_bytes(term.n_bytes), term.detail) for term in self.terms]
        rows.append(("total", format_bytes(self.total_bytes), "and more" if self.partial else ""))
        if self.cap_bytes is not None:
            over = self.total_bytes - self.cap_bytes
            unknown = "to find out whether it fits takes more than the system has" if self.partial else ""
            what = f"over by {format_bytes(over)}" if over > 0 else unknown
            rows.append((self.cap_name, format_bytes(self.cap_bytes), what))
        width = max(len(name) for name, _, _ in rows)
        return "\n".join(f"  {name:{width}}  {size:>9}  {detail}".rstrip() for name, size, detail in rows)

    def require(self) -> None:
        """Raise MemoryCapError, with the table, unless the plan fits."""
        if not self.fits:
            needed = format_bytes(self.total_bytes)
            if self.partial:
                needed = f"more than {needed}"
            elif self.given_up:
                needed += " at the least"
            without = f", even with {', '.join(self.given_up)}" if self.given_up else ""
            advice = "close programs, or take" if self.total_bytes <= (self.cap_bytes or 0) else "allow more, or take"
            raise MemoryCapError(
                f"the model needs {needed}{without}; {self.cap_name}: "
                f"{format_bytes(self.cap_bytes or 0)}\n{self.table()}\n"
                f"{advice} a smaller model; edgedec plan MODEL shows what would fit"
            )


def parse_size(size: str | int) -> int:
    """Return the bytes of a size such as "900MB", "1.5GiB", "123456" or 123456.

    >>> parse_size("900MB"), parse_size("1.5 GiB"), parse_size("2k"), parse_size(5)
    (900000000, 1610612736, 2000, 5)

    Raises:
        RequestError: The text is no size, or the size is not from 1 to 2^63 bytes.
    """
    text = str(size)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower(), flags=re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise RequestError(f"{text!r} is no size; write 900MB (10^6 bytes), 1.5GiB (2^30), or a number of bytes")
    n_bytes = float(match[1]) * _UNITS[match[2]]
    if not 1 <= n_bytes < _MOST_BYTES:
        raise RequestError(f"{text!r} is no size: it must be above zero, and below 2^63 bytes")
    return int(n_bytes)


def format_bytes(n_bytes: int) -> str:
    """Return a number of bytes for a person, with a unit: MB below 10 GB.

    >>> format_bytes(98_362_432), format_bytes(12_345_678_900), format_bytes(1234)
    ('98.4 MB', '12.3 GB', '1.2 kB')
    """
    for unit, scale in (("GB", 10**10), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= scale:
            divisor = 10**9 if unit == "GB" else scale
            return f"{n_bytes / divisor:.1f} {unit}"
    return f"{n_bytes} B"
