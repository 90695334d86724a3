"""How far ahead of a product weights are fetched into the caches: found by measuring, once on each machine.

Which setting is fastest depends on the processor, on the type of the weights and on how many rows they are multiplied
with. No setting changes a bit. What was measured is kept with the other measurements, for all models of this machine.
"""

import ctypes
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic

from edgedec import __version__
from edgedec.errors import OptionError, counted
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.progress import check_cancelled, stage
from edgedec.storage import probe_cache
from edgedec_runtimes.cpu.library import check, native
from edgedec_runtimes.cpu.native_tables import NUMBERS
from edgedec_runtimes.cpu.tensor_places import TILE_TYPES

KIND = "prefetch"
ROWS = (1, 2, 4, 8)
"""Rows of products that are measured; other numbers have the setting of the next one, those above that of the last."""
TABLE_ROWS, MOST_BYTES = NUMBERS["EC_AHEAD_ROWS"], NUMBERS["EC_MOST_AHEAD"]
LEAST_BYTES, LEAST_TOGETHER = 16 << 20, 64 << 20
"""Weights of a type, and of all types that are measured together, that a measurement needs: fewer may be in a cache."""

_PIECE_BYTES = 16 << 20  # of weights, for one measurement
_REGION_BYTES = 128 << 20  # of weights, that measurements go around in: more than a cache holds
_ROUNDS, _LEAST_ROUNDS = 24, 3
_GAIN = 0.95  # the part of the usual time that another setting must stay below
_WHAT = "how far ahead weights are fetched"  # as reports and errors call it
_WITHOUT = frozenset({"portable"})  # instruction sets that can't fetch


@dataclass(frozen=True, slots=True)
class Ahead:
    """How many bytes ahead of what is multiplied weights are fetched.

    A processor that has many requests under way drops others, so it can pay to ask for the same weights again.

    Attributes:
        l1: Into the L1 cache; 0: nothing is, -1: what is usual for the instruction set is done.
        l2: Into the L2 cache; 0: nothing is.
        times: How many times weights are asked for into the L2 cache: so many times `l2` bytes ahead at first, `l2`
            bytes ahead at last.
    """

    l1: int
    l2: int
    times: int = 1

    def __str__(self) -> str:
        if self == USUAL:
            return "usual"
        parts = [f"{name}:{n_bytes}" for name, n_bytes in (("L1", self.l1), ("L2", self.l2)) if n_bytes]
        return "+".join(parts) + (f"x{self.times}" if self.times > 1 else "") or "off"


USUAL, OFF = Ahead(-1, 0), Ahead(0, 0)
CANDIDATES = (USUAL, Ahead(4608, 0), Ahead(1536, 12288), Ahead(0, 8064), Ahead(0, 6144, 2), Ahead(0, 4096, 3))
"""The settings that are measured. Fetching nothing is not among them: it is never much faster, and often slower."""

Settings = Mapping[GGMLType, Mapping[int, Ahead]]
"""By the type of the weights, and the numbers of rows in ROWS."""
SecondsOf = Callable[[GGMLType, int, Ahead], float]
"""Measures products of a type with a number of rows, of other weights at each call."""


def parse(text: str) -> Ahead:
    """Return the setting that a text names, as in CpuOptions.prefetch.

    Raises:
        OptionError: It names none.
    """
    if text in ("usual", "off"):
        return USUAL if text == "usual" else OFF
    distances = OFF
    for part in text.split("+"):
        match = re.fullmatch(r"L1:([0-9]+)|L2:([0-9]+)(?:x([0-9]+))?", part)
        if match is None or not 1 <= int(match[1] or match[2]) * int(match[3] or 1) <= MOST_BYTES:
            raise OptionError(
                "prefetch",
                text,
                f"it must be auto, usual, off, or bytes from 1 to {MOST_BYTES} "
                'as "L1:1536+L2:12288", or "L2:4096x3" for 3 times, at most 12288 bytes ahead',
            )
        if match[1]:
            distances = replace(distances, l1=int(match[1]))
        else:
            distances = replace(distances, l2=int(match[2]), times=int(match[3] or 1))
    return distances


def key(instruction_set: str, n_threads: int) -> str:
    """Return the key of what was measured: the release, the machine, the instruction set, the threads."""
    machine = probe_cache.machine_key(LoadOptions(n_threads=n_threads))
    return f"{__version__} {machine} {instruction_set}"


def stored_settings(cache_dir: Path | None, instruction_set: str, n_threads: int) -> dict[GGMLType, dict[int, Ahead]]:
    """Return the settings that were measured before; {} where none were, or what is kept is damaged."""
    stored = probe_cache.get(cache_dir, KIND, key(instruction_set, n_threads))
    try:
        return {
            GGMLType[name]: {int(n): _ahead(*ahead) for n, ahead in by_rows.items()} for name, by_rows in stored.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def set_up(
    handle: ctypes.c_void_p,
    wish: str,
    instruction_set: str,
    bytes_of: Mapping[GGMLType, int],
    n_threads: int,
    options: LoadOptions,
) -> None:
    """Set how far ahead a finished model fetches its weights.

    Args:
        handle: The native model.
        wish: As CpuOptions.prefetch. With "auto", what is not known is measured, in a second or so, where it can be
            kept.
        instruction_set: Of the model's kernels.
        bytes_of: The bytes of the model's weights that stay in memory and are multiplied, by type.
        n_threads: The threads of the model's forwards.
        options: How the model is loaded.

    Raises:
        OptionError: `wish` names no setting.
        CancelledError: The load was cancelled.
    """
    if wish != "auto":
        _apply(handle, dict.fromkeys(TILE_TYPES, dict.fromkeys(ROWS, parse(wish))))
        return
    if options.cache_dir is None or instruction_set in _WITHOUT:
        return
    settings = stored_settings(options.cache_dir, instruction_set, n_threads)
    new = [kind for kind, n_bytes in bytes_of.items() if n_bytes >= LEAST_BYTES and kind not in settings]
    if new and sum(bytes_of[kind] for kind in new) >= LEAST_TOGETHER:
        is_quiet = probe_cache.quiet_from_now()
        cancelled = partial(check_cancelled, options.cancel, f"measuring {_WHAT}")
        with stage(options.on_progress, "measuring", _WHAT):
            settings |= measure(new, Products(handle, bytes_of), check_cancel=cancelled, is_quiet=is_quiet)
        document = {kind.name: {str(n): astuple(ahead) for n, ahead in of.items()} for kind, of in settings.items()}
        if is_quiet():
            probe_cache.put(options.cache_dir, KIND, key(instruction_set, n_threads), document)
    _apply(handle, settings)


def measure(
    kinds: Sequence[GGMLType],
    seconds_of: SecondsOf,
    *,
    limit_s: float = 1.0,
    check_cancel: Callable[[], None] = lambda: None,
    is_quiet: Callable[[], bool] = lambda: True,
) -> dict[GGMLType, dict[int, Ahead]]:
    """Return the fastest setting for each type and number of rows; the usual one unless another is clearly faster.

    Settings are measured in turn, in rounds as long as time is left. Of each the least time counts: a busy moment makes
    a measurement longer, never shorter. On a machine that is not quiet, nothing is returned.
    """
    cases = [(kind, n, ahead) for n in ROWS for ahead in CANDIDATES for kind in kinds]
    seconds: dict[tuple[GGMLType, int, Ahead], list[float]] = {case: [] for case in cases}
    rng, until = random.Random(0), monotonic() + limit_s
    for number in range(_ROUNDS):
        if number >= _LEAST_ROUNDS and monotonic() > until:
            break
        check_cancel()
        rng.shuffle(cases)
        for case in cases:
            if not is_quiet():
                return {}
            seconds[case].append(seconds_of(*case))
    times = {case: min(timings) for case, timings in seconds.items()}
    return {kind: {n: _fastest({ahead: times[kind, n, ahead] for ahead in CANDIDATES}) for n in ROWS} for kind in kinds}


class Products:
    """Measures products of a native model, of one piece of its weights after another (SecondsOf)."""

    def __init__(self, handle: ctypes.c_void_p, bytes_of: Mapping[GGMLType, int]) -> None:
        """Take a finished model, and the bytes of its weights by type."""
        self._handle = handle
        self._region = {kind: min(n_bytes, _REGION_BYTES) for kind, n_bytes in bytes_of.items()}
        self._next: dict[GGMLType, int] = {}

    def __call__(self, kind: GGMLType, n: int, ahead: Ahead) -> float:
        """Return the seconds of products with n rows."""
        if kind not in self._next:  # so that all pages are in memory and known to the process
            self._seconds(kind, 1, USUAL, 0, self._region[kind])
        start = self._next.get(kind, 0)
        self._next[kind] = (start + _PIECE_BYTES) % self._region[kind]
        return self._seconds(kind, n, ahead, start, _PIECE_BYTES)

    def _seconds(self, kind: GGMLType, n: int, ahead: Ahead, start: int, n_bytes: int) -> float:
        _set(self._handle, kind, n, ahead)
        seconds = ctypes.c_double()
        code = native().ec_model_time_products(self._handle, kind, n, start, n_bytes, ctypes.byref(seconds))
        check(code, f"products of {kind.name}")
        return seconds.value


def described(settings: Settings) -> str:
    """Return settings in words for a person, for `edgedec doctor`.

    >>> described({GGMLType.Q4_K: {1: Ahead(0, 4608), 2: Ahead(0, 4608), 4: Ahead(0, 4608), 8: USUAL}})
    'weights are fetched ahead as measured: Q4_K L2:4608 (8 rows: usual)'
    >>> described({})
    'weights are fetched ahead as usual: nothing was measured yet, which the first load of a model does'
    """
    if not settings:
        return "weights are fetched ahead as usual: nothing was measured yet, which the first load of a model does"
    lines = []
    for kind, by_rows in settings.items():
        aheads = list(by_rows.values())
        most = max(aheads, key=aheads.count)
        others = [f"{counted(n, 'row')}: {ahead}" for n, ahead in by_rows.items() if ahead != most]
        lines.append(f"{kind.name} {most}" + (f" ({', '.join(others)})" if others else ""))
    return f"weights are fetched ahead as measured: {', '.join(lines)}"


def _fastest(times: Mapping[Ahead, float]) -> Ahead:
    best = min(times, key=lambda ahead: times[ahead])
    return best if times[best] < _GAIN * times[USUAL] else USUAL


def _ahead(l1: object, l2: object, times: object) -> Ahead:
    """Return a setting as it was kept (ValueError where it is none)."""
    if not (type(l1) is int and type(l2) is int and type(times) is int and -1 <= l1 <= MOST_BYTES):
        raise ValueError(l1, l2, times)
    if not (l2 >= 0 and times >= 1 and l2 * times <= MOST_BYTES):
        raise ValueError(l1, l2, times)
    return Ahead(l1, l2, times)


def _apply(handle: ctypes.c_void_p, settings: Settings) -> None:
    """Give a model its settings, for every number of rows."""
    for kind, by_rows in settings.items():
        for n in range(1, TABLE_ROWS + 1):
            at = next((rows for rows in sorted(by_rows) if rows >= n), max(by_rows))
            _set(handle, kind, n, by_rows[at])


def _set(handle: ctypes.c_void_p, kind: GGMLType, n: int, ahead: Ahead) -> None:
    check(native().ec_model_set_ahead(handle, kind, n, ahead.l1, ahead.l2, ahead.times), f"fetching {kind.name} ahead")
