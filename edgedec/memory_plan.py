"""The memory plan: the bytes that will be held, by name, against the bytes that are allowed; devices with memory.

MB is 10^6 bytes and MiB 2^20. Memory is held where the system counts it as resident: private pages, and the pages of
mapped files that are in memory (VmRSS and VmHWM on Linux, the working set on Windows, resident_size on macOS).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from edgedec.callers import one_line
from edgedec.errors import MemoryCapError, RequestError, argument
from edgedec.load_options import LoadOptions

HOST = "host"
"""The column of a memory plan for the memory that the CPU uses."""

Size = float | str
"""A number of bytes, or a text such as "900MB"."""

Split = tuple[tuple[str, int], ...]
"""How many layers each device takes (LoadOptions.layer_split)."""

IsOver = Callable[[Split, str], bool]
"""Tells for a split whether a device, by its name, would hold more than its cap."""

OTHER_MODELS = "other models"
"""The term of the models that are loaded already, where a cap is for all models together."""

DRIVER = "driver"
"""The term of what driver and library take on a device beside a model's tensors."""

_MOST_BYTES = 1 << 63
_SCALES = {"": 1000, "b": 1000, "ib": 1024}
_UNITS = {"": 1, "b": 1} | {f"{k}{end}": scale**n for n, k in enumerate("kmgt", 1) for end, scale in _SCALES.items()}


@dataclass(frozen=True, slots=True)
class Device:
    """A device beside the CPU, with memory of its own or with a share of the host's.

    Attributes:
        name: The name that the runtime gives it, such as "CUDA0"; no two devices of a runtime have the same.
        backend: The kind of the device: "CUDA", "Vulkan", "Metal", "RPC", ...
        total_bytes: All of its memory.
        free_bytes: What can still be taken. Where the memory is unified, the host's free memory counts instead.
        unified: Whether it uses the host's memory (Jetson, Apple, integrated GPUs). Its terms are then the host's.
        driver_bytes: What driver and library take there for a model, beside the model's tensors.
        measured: Whether `driver_bytes` was found by the device's own account of an earlier load.
        description: The device's full name, for a person.
    """

    name: str
    backend: str
    total_bytes: int
    free_bytes: int
    unified: bool = False
    driver_bytes: int = 0
    measured: bool = False
    description: str = ""


@dataclass(frozen=True, slots=True)
class DeviceCap:
    """How much of a device's memory a model may take.

    Attributes:
        device: The device.
        cap_bytes: The most bytes.
        cap_name: Where the cap comes from: "allowed" by the user, or "free" on the device.
        held_bytes: What the load took there by the device's own account; None before it, and where that is unknown.
    """

    device: Device
    cap_bytes: int
    cap_name: str = "free"
    held_bytes: int | None = None


@runtime_checkable
class HasDevices(Protocol):
    """A runtime that puts layers on devices, and honours LoadOptions.layer_split."""

    def devices(self, options: LoadOptions) -> tuple[Device, ...]:
        """Return the devices for layers under these options, in the order in which they take layers; no CPU.

        LoadOptions.device names the only one that is wanted. What their drivers take is that of earlier loads, where
        the runtime has kept it (edgedec_runtimes.shared.device_account).

        Raises:
            EdgedecError: The runtime does not work, there is no device of that name, or another machine does not
                answer.
        """

    def split(self, names: Sequence[str], n_layers: int, is_over: IsOver, *, whole: bool) -> Split:
        """Return how many layers each device takes (edgedec_runtimes.shared.layer_split fills the nearest ones first).

        Args:
            names: The devices in the order of the layers.
            n_layers: Layers that are wanted on devices: all of them where `whole`, else as many as fit.
            is_over: Tells whether a device is over its cap.
            whole: Whether no layer may be left over.
        """

    def account(self, plan: "MemoryPlan", options: LoadOptions) -> "MemoryPlan":
        """Return the plan, after a load, with what its devices say that the load took there (DeviceCap.held_bytes)."""


def devices_of(runtime: object, options: LoadOptions) -> tuple[Device, ...]:
    """Return a runtime's devices under these options (raises as HasDevices.devices); none where it has none."""
    return runtime.devices(options) if isinstance(runtime, HasDevices) else ()


def n_split(split: Split) -> int:
    """Return how many layers a split puts on devices.

    >>> n_split((("RPC0", 4), ("CUDA0", 20)))
    24
    """
    return sum(n_layers for _, n_layers in split)


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
        device: The name of the device that holds it (Device), or HOST.
        slowdown: How many times as long a step takes as where all weights are in memory, by the measured rates of disk
            and memory; infinite where one of them was not measured.
    """

    name: str
    n_bytes: int
    detail: str = ""
    base: bool = False
    partial: bool = False
    grows: bool = False
    device: str = HOST
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The terms of a plan, and the caps that their sums must keep to: one for the host, and one for each device.

    What a device takes of unified memory counts as the host's, too.

    Attributes:
        terms: What will be held at the peak; none where nothing was planned.
        cap_bytes: The most bytes of the host's memory, or None for no cap.
        given_up: A phrase for each thing that was given up to fit.
        cap_name: Where the cap comes from: "allowed" by the user, or "free" on this machine.
        devices: The devices that may hold layers, with their caps.
    """

    terms: tuple[MemoryTerm, ...]
    cap_bytes: int | None = None
    given_up: tuple[str, ...] = ()
    cap_name: str = "allowed"
    devices: tuple[DeviceCap, ...] = ()

    __repr__ = one_line

    @property
    def total_bytes(self) -> int:
        """The bytes of all terms of the host."""
        return sum(term.n_bytes for term in self._host_terms())

    @property
    def start_bytes(self) -> int:
        """The bytes of the host that are held with a short text: those of the terms that don't grow with texts."""
        return sum(term.n_bytes for term in self._host_terms() if not term.grows)

    @property
    def slowdown(self) -> float:
        """How many times as long a step takes as where all weights are in memory; infinite where not measured."""
        return max((term.slowdown for term in self.terms), default=1.0)

    @property
    def own_bytes(self) -> int:
        """The host's bytes of the model itself: without those of the process, and of other models."""
        return sum(term.n_bytes for term in self._host_terms() if not term.base and term.name != OTHER_MODELS)

    @property
    def process_cap_bytes(self) -> int | None:
        """The cap where it is for the whole process, else None; less what devices take of unified memory.

        The system does not count a GPU's buffers as the process's.
        """
        if self.cap_bytes is None or not any(term.base for term in self.terms):
            return None
        return self.cap_bytes - sum(self.device_bytes(cap.device.name) for cap in self.devices if cap.device.unified)

    @property
    def fits(self) -> bool:
        """Whether the sums are known and none is over its cap."""
        return not self.over_bytes and (self.cap_bytes is None or not self.partial)

    @property
    def over_bytes(self) -> int:
        """By how many bytes the columns are over their caps, together."""
        host = 0 if self.cap_bytes is None else max(0, self.total_bytes - self.cap_bytes)
        return host + sum(max(0, self.device_bytes(cap.device.name) - cap.cap_bytes) for cap in self.devices)

    @property
    def partial(self) -> bool:
        """Whether more is needed, of unknown size."""
        return any(term.partial for term in self.terms)

    @property
    def caps(self) -> str:
        """The caps for a person, such as "900.0 MB" or "900.0 MB and 4000.0 MB on CUDA0"."""
        host = [] if self.cap_bytes is None else [format_bytes(self.cap_bytes)]
        return " and ".join([*host, *(f"{format_bytes(cap.cap_bytes)} on {cap.device.name}" for cap in self.devices)])

    def device_bytes(self, name: str) -> int:
        """The bytes of the terms of a device, by its name."""
        return sum(term.n_bytes for term in self.terms if term.device == name)

    def table(self) -> str:
        """Return the plan as plain text: a line for each term, with a column for each device that has its own memory.

        Without such a device there is one column, which has the terms of unified devices as well.
        """
        discrete = [cap for cap in self.devices if not cap.device.unified]
        names = [HOST, *(cap.device.name for cap in discrete)]
        rows = [["", *names, ""]] if discrete else []
        for name in dict.fromkeys(term.name for term in self.terms):
            terms = [term for term in self.terms if term.name == name]
            sizes = [sum(term.n_bytes for term in terms if self._column(term) == column) for column in names]
            details = dict.fromkeys(self._detail(term) for term in terms)
            shown = [format_bytes(n) if n or len(names) == 1 else "" for n in sizes]
            rows.append([name, *shown, ", ".join(filter(None, details))])
        totals = [self.total_bytes, *(self.device_bytes(cap.device.name) for cap in discrete)]
        rows.append(["total", *map(format_bytes, totals), "and more" if self.partial else ""])
        rows += self._cap_rows(discrete)
        widths = [max(len(row[0]) for row in rows), *([9] + [max(9, len(name)) for name in names[1:]])]
        return "\n".join(_line(row, widths) for row in rows)

    def _cap_rows(self, discrete: Sequence[DeviceCap]) -> list[list[str]]:
        """Return the last lines of the table: the caps, with what is over them; those of unified devices by name."""
        caps = [(self.cap_bytes, self.cap_name), *((cap.cap_bytes, cap.cap_name) for cap in discrete)]
        rows = []
        for cap_name in dict.fromkeys(name for n_bytes, name in caps if n_bytes is not None):
            sizes = [format_bytes(n or 0) if n is not None and name == cap_name else "" for n, name in caps]
            rows.append([cap_name, *sizes, ""])
        if rows:
            overs = [f"over by {format_bytes(n_over)}{where}" for n_over, where in self._overs() if n_over > 0]
            unknown = ["to find out whether it fits takes more than the system has"] if self.partial else []
            rows[-1][-1] = ", ".join(overs or unknown)
        return rows

    def _overs(self) -> list[tuple[int, str]]:
        """Return by how much each column is over its cap, with words for the column; "" where there is one only."""
        where = " on the host" if any(not cap.device.unified for cap in self.devices) else ""
        host = [] if self.cap_bytes is None else [(self.total_bytes - self.cap_bytes, where)]
        names = [(cap, cap.device.name) for cap in self.devices]
        return host + [(self.device_bytes(name) - cap.cap_bytes, f" on {name}") for cap, name in names]

    def _host_terms(self) -> list[MemoryTerm]:
        return [term for term in self.terms if self._column(term) == HOST]

    def _column(self, term: MemoryTerm) -> str:
        unified = {cap.device.name for cap in self.devices if cap.device.unified}
        return HOST if term.device in unified else term.device

    def _detail(self, term: MemoryTerm) -> str:
        is_unified = term.device != HOST and self._column(term) == HOST
        return ": ".join(filter(None, (term.device, term.detail))) if is_unified else term.detail

    @property
    def shortage(self) -> str:
        """What is needed, given up and allowed, for a person, and on the last line what to do."""
        without = f", even with {', '.join(self.given_up)}" if self.given_up else ""
        caps = [f"{self.cap_name}: {format_bytes(self.cap_bytes)}"] if self.cap_bytes is not None else []
        caps += [f"{cap.cap_name} on {cap.device.name}: {format_bytes(cap.cap_bytes)}" for cap in self.devices]
        return f"{' and '.join(self._needs())}{without}; {', '.join(caps)}\n{self._advice()} a smaller model"

    def require(self) -> None:
        """Raise MemoryCapError, with the table, unless the plan fits."""
        if not self.fits:
            needs, _, advice = self.shortage.partition("\n")
            raise MemoryCapError(
                f"the model needs {needs}\n{self.table()}\n{advice}; edgedec plan MODEL shows what would fit"
            )

    def _needs(self) -> list[str]:
        least = " at the least" if self.given_up and not self.partial else ""
        more = "more than " if self.partial else ""
        where = " of the host's memory" if self.devices else ""
        host = f"{more}{format_bytes(self.total_bytes)}{where}{least}"
        needed = [(cap.device.name, self.device_bytes(cap.device.name)) for cap in self.devices]
        return [host, *(f"{format_bytes(n_bytes)} on {name}" for name, n_bytes in needed if n_bytes)]

    def _advice(self) -> str:
        over = [cap for cap in self.devices if self.device_bytes(cap.device.name) > cap.cap_bytes]
        if over:
            option = argument("n_gpu_layers")
            return f"put fewer layers on {over[0].device.name} (leave {option} out to have as many as fit), or take"
        is_over = self.total_bytes > (self.cap_bytes or 0)
        return "allow more, or take" if is_over else "close programs, or take"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [f"{row[0]:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:], strict=True))]
    return ("  " + "  ".join([*cells, row[-1]])).rstrip()


def parse_size(size: Size, name: str = "") -> int:
    """Return the bytes of a size such as "900MB", "1.5GiB", "123456" or 123456; `name` is the argument that has it.

    >>> parse_size("900MB"), parse_size("1.5 GiB"), parse_size("2k"), parse_size(5)
    (900000000, 1610612736, 2000, 5)

    Raises:
        RequestError: The text is no size, or the size is not from 1 to 2^63 bytes.
    """
    text, of = str(size), f"{argument(name)}: " if name else ""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower(), flags=re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise RequestError(f"{of}{text!r} is no size; write 900MB (10^6 bytes), 1.5GiB (2^30), or a number of bytes")
    n_bytes = float(match[1]) * _UNITS[match[2]]
    if not 1 <= n_bytes < _MOST_BYTES:
        raise RequestError(f"{of}{text!r} is no size: it must be above zero, and below 2^63 bytes")
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
