"""Measures how many rows of a forward are bit-equal to single steps, for libraries that do not say.

A library's kernels for one row and for several rows differ by weight type, processor, release and shape, so the number
differs by model: any number on some types, at most 3 on others. It also differs by the length of the context: llama.cpp
rounds the cells that attention reads up to a multiple of 256, and from 512 cells on ggml's flash attention on CPUs
splits the keys of a single row among the threads (ggml/src/ggml-cpu/ops.cpp, `use_split_kv_path`), but never the keys
of several rows. So the number is measured for each range of RANGE_TOKENS positions, and no draft crosses the border of
two ranges.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ContextFullError
from edgedec.model import ExactRows, Model, Session
from edgedec.sessions.cost_probe import LEAST_COMPARED, N_MAX, as_prompt
from edgedec.storage import probe_cache

KIND = "invariance"
"""The kind of fact that measured numbers are kept as in the probe cache."""

N_PREFIX = 40
"""How many tokens stand before the rows that are compared."""
RANGE_TOKENS = 256
"""Length of a range of positions; a number of exact rows holds for one range."""
SLOWEST_STEP_S = 10.0
"""Where a step takes longer, nothing is measured, which takes as long as some 60 steps: no two rows count as equal."""


def measured_invariance(model: Model, cache_dir: Path | None, *, n_prefix: int = N_PREFIX, n_room: int = 0) -> int:
    """Return the largest n whose rows are bit-equal to single steps: at most N_MAX, and at most Capabilities.max_rows.

    The step after the rows is compared too, also where other rows were evaluated before and dropped. The number holds
    for contexts of the same range as `n_prefix`. The session has `n_room` tokens more than are compared. The number is
    kept in `cache_dir` by the model's fingerprint, which names file, release, machine and options. It is 1, and not
    kept, where a step takes longer than SLOWEST_STEP_S.
    """
    n_max = min(N_MAX, model.capabilities.max_rows)
    if n_max == 1 or not model.capabilities.rollback:
        return 1
    remembered = _known(model.card.fingerprint, n_max, cache_dir, n_prefix)
    if remembered is not None:
        return remembered
    n_tokens = n_prefix + n_max + 1
    tokens = _some_tokens(model, n_tokens)
    tokens[:n_prefix] = as_prompt(tokens[:n_prefix], model.tokenizer)
    session = model.session(n_tokens + n_room)
    try:
        if model.card.adapters:  # a forward with adapters has what one without them has, and more
            session.scales = (1.0,) * len(model.card.adapters)
        if all(_step_s(session, tokens) > SLOWEST_STEP_S for _ in range(2)):  # a first one may compile kernels
            return 1
        session.forward(tokens[:n_prefix], n_past=0)
        result = _largest_equal(session, n_prefix, tokens[n_prefix:], range(2, n_max + 1))
    finally:
        session.close()
    probe_cache.put(cache_dir, KIND, _key(model.card.fingerprint, n_max, n_prefix), result)
    return result


def will_probe(fingerprint: str, max_rows: int, cache_dir: Path | None) -> bool:
    """Return whether a model that is loaded for `max_rows` rows would be measured, as the number is not known yet."""
    n_max = min(N_MAX, max_rows)
    return n_max > 1 and _known(fingerprint, n_max, cache_dir, N_PREFIX) is None


class MeasuredRows:
    """How many rows of a forward are bit-equal to single steps, by the length of the context.

    Measured numbers are kept in `cache_dir` by the model's fingerprint. Kernels are assumed to agree less, never more,
    in longer contexts: a number of rows that differed in one range is not used in a later range either.
    """

    def __init__(self, model: Model, cache_dir: Path | None) -> None:
        """Begin with the numbers that are known of the model."""
        self._model = model
        self._cache_dir = cache_dir
        self._key = f"{model.card.fingerprint} {min(N_MAX, model.capabilities.max_rows)} by range"
        self._found = _remembered_ranges(probe_cache.get(cache_dir, KIND, self._key))

    def at(self, session: Session, n_past: int, measure: int = 0) -> ExactRows:
        """Return how many rows after `n_past` cached tokens of a session are exact, and how many may be.

        Both end with the range that `n_past` lies in, so they are 1 at the range's last position. Where it is unknown
        whether `measure` rows are, it is measured by forwards of the session itself at `n_past`, which leave no more
        behind than a rejected draft does, unless too little is left of the range or the session.

        Raises:
            What Session.forward raises.
        """
        place, n_left = n_past // RANGE_TOKENS, RANGE_TOKENS - n_past % RANGE_TOKENS
        for is_last in (False, True):
            most = self._ceiling(place)
            if most < 2:
                return ExactRows(1, None)
            proven = self._model_rows if place == 0 else self._proven(place)
            if is_last or not proven < measure <= min(most, n_left):
                break
            self._measure(session, n_past, measure)
        return ExactRows(min(proven, most, n_left), min(most, n_left))

    def _proven(self, place: int) -> int:
        """Return how many rows were measured to be exact in a range."""
        return self._found.get(place, (1, 0))[0]

    def _measure(self, session: Session, n_past: int, n_rows: int) -> None:
        """Measure whether `n_rows` rows of a session are exact at `n_past`, where there is room for it."""
        place = n_past // RANGE_TOKENS
        proven, ceiling = self._proven(place), self._ceiling(place)
        n = min(ceiling, 1 << (n_rows - 1).bit_length())  # in powers of two: each larger draft is not measured anew
        n_compared = max(LEAST_COMPARED, n)
        if n_compared + 1 > min(RANGE_TOKENS - n_past % RANGE_TOKENS, session.n_ctx - n_past):
            return
        tokens = _some_tokens(self._model, n_compared + 1)
        try:
            if proven < 2 and _largest_equal(session, n_past, tokens[:3], (2,)) < 2:  # most models differ here already
                equal = 1
            else:
                equal = _largest_equal(session, n_past, tokens, sorted({2, max(2, proven), n_rows, n}))
        except ContextFullError:  # other sessions have taken the cells
            return
        self._found[place] = (equal, ceiling if equal == n else equal)
        probe_cache.put(self._cache_dir, KIND, self._key, {str(at): list(ranges) for at, ranges in self._found.items()})

    @property
    def _model_rows(self) -> int:
        claim = self._model.batch_invariant
        return self._model.capabilities.max_rows if claim is True else claim

    def _ceiling(self, place: int) -> int:
        """Return the most rows that are not known to differ in a range or in an earlier one."""
        return min([self._model_rows, *(ranges[1] for at, ranges in self._found.items() if at <= place)])


def _remembered_ranges(value: object) -> dict[int, tuple[int, int]]:
    """Return by range how many rows are proven equal and how many are not disproven; empty where `value` is damaged."""
    ranges: dict[int, tuple[int, int]] = {}
    for place, remembered in value.items() if isinstance(value, dict) else ():
        if not (isinstance(place, str) and place.isdecimal() and isinstance(remembered, list) and len(remembered) == 2):
            return {}
        proven, ceiling = remembered
        if not (type(proven) is int and type(ceiling) is int and 1 <= proven <= ceiling <= N_MAX):
            return {}
        ranges[int(place)] = proven, ceiling
    return ranges


def _known(fingerprint: str, n_max: int, cache_dir: Path | None, n_prefix: int) -> int | None:
    remembered = probe_cache.get(cache_dir, KIND, _key(fingerprint, n_max, n_prefix))
    return remembered if type(remembered) is int and 1 <= remembered <= n_max else None


def _key(fingerprint: str, n_max: int, n_prefix: int) -> str:
    return f"{fingerprint} {n_max} rows" + (f" {n_prefix}" if n_prefix != N_PREFIX else "")


def _some_tokens(model: Model, n: int) -> NDArray[np.int32]:
    return np.random.default_rng(0).integers(0, model.card.n_vocab, n).astype(np.int32)


def _step_s(session: Session, tokens: NDArray[np.int32]) -> float:
    """Return the seconds of a step at the beginning of a context."""
    begun = perf_counter()
    session.forward(tokens[:1], n_past=0)
    return perf_counter() - begun


def _largest_equal(session: Session, n_past: int, tokens: NDArray[np.int32], sizes: Sequence[int]) -> int:
    """Return the last of `sizes`, ascending, up to which forwards of that many rows equal single steps; 1 if none do.

    Each size is tried on the same rows, in consecutive forwards with a single step at the end, so that keys and values
    are compared too. Before that the session goes back from other rows, as it does after a rejected draft.
    """
    ends = {n: min(max(LEAST_COMPARED, n), len(tokens) - 1) for n in sizes}
    n_steps = max(ends.values()) + 1
    steps = [_digest(session.forward(tokens[i : i + 1], n_past=n_past + i).logits[0]) for i in range(n_steps)]
    session.forward(tokens[1:n_steps][::-1], n_past=n_past)
    largest = 1
    for n, end in ends.items():
        pieces = [(start, min(start + n, end)) for start in range(0, end, n)] + [(end, end + 1)]
        for start, stop in pieces:
            rows = session.forward(tokens[start:stop], n_past=n_past + start, rows="all").logits
            if [_digest(row) for row in rows] != steps[start:stop]:
                return largest
        largest = n
    return largest


def _digest(row: NDArray[np.float32]) -> bytes:
    """Return a hash of a row's bits, as a memory plan has no room for rows of a large vocabulary."""
    return hashlib.sha256(row.tobytes()).digest()
