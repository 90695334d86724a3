"""What a forward was asked for, checked: everything is looked at before anything is evaluated."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, ContextFullError, RequestError, SessionError
from edgedec.model import ForwardItem, LayerSet, Rows
from edgedec_runtimes.reference.network import Floats, Row
from edgedec_runtimes.reference.session import ReferenceSession
from edgedec_runtimes.reference.weights import Weights


@dataclass(frozen=True, slots=True)
class Work:
    """One item, ready to be evaluated.

    Attributes:
        inputs: f32[n, n_embd], embeddings of the tokens or the hidden states given.
        rows: How to evaluate each of them.
        wanted: Indices of the rows whose logits are asked for.
    """

    item: ForwardItem
    session: ReferenceSession
    inputs: Floats
    rows: tuple[Row, ...]
    wanted: NDArray[np.intp]

    @property
    def first_layer(self) -> int:
        """The layer to begin with."""
        return _first_layer(self.item)


def check(item: ForwardItem, weights: Weights, max_rows: int) -> Work:
    """Return the item as work.

    Raises:
        ContextFullError, SessionError, RequestError, CapabilityError: As Session.forward; nothing has changed.
    """
    session = item.session
    if not isinstance(session, ReferenceSession):
        raise SessionError("a forward was given a session of another runtime")
    session.check_open()
    inputs = _inputs(item, weights)
    n = len(inputs)
    _check_past(item, session, n)
    parents = _parents(item, n)
    layers, taps = _layers(item, weights.hyper.n_layer), _taps(item, weights.hyper.n_layer)
    _check_written(item, session, layers)
    wanted = _wanted(item.rows, n)
    if len(wanted) > max_rows:
        raise CapabilityError(f"{len(wanted)} rows of logits were asked for; a forward returns at most {max_rows}")
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else range(item.n_past)), item.n_past + row])
    rows = tuple(Row(np.array(path, dtype=np.intp), taps, _first_layer(item), layers) for path in paths)
    return Work(item, session, inputs, rows, wanted)


def _first_layer(item: ForwardItem) -> int:
    return 0 if item.resume_after is None else item.resume_after + 1


def _inputs(item: ForwardItem, weights: Weights) -> Floats:
    if (item.tokens is None) == (item.hidden is None) or (item.hidden is None) != (item.resume_after is None):
        raise RequestError("a forward takes either tokens, or hidden together with resume_after")
    hyper = weights.hyper
    if item.tokens is None:
        hidden = np.asarray(item.hidden, dtype=np.float32)
        if hidden.ndim != 2 or hidden.shape[1] != hyper.n_embd or not len(hidden):
            raise RequestError(f"hidden has the shape {hidden.shape}; it must be (rows from 1, {hyper.n_embd})")
        if not 0 <= (item.resume_after or 0) < hyper.n_layer:
            raise RequestError(f"resume_after is {item.resume_after}; it must be 0 to {hyper.n_layer - 1}")
        return hidden
    tokens = np.asarray(item.tokens)
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        raise RequestError(f"tokens are {tokens.dtype}{list(tokens.shape)}; they must be a row of at least one id")
    if int(tokens.min()) < 0 or int(tokens.max()) >= hyper.n_vocab:
        raise RequestError(f"a token id is outside the vocabulary of {hyper.n_vocab}")
    return weights.embedding[tokens]


def _check_past(item: ForwardItem, session: ReferenceSession, n: int) -> None:
    if item.n_past < 0:
        raise RequestError(f"n_past is {item.n_past}; it must be from 0")
    if item.n_past > session.n_cached:
        branched = " (the last forward was a tree: call keep, or go back)" if session.is_branched else ""
        raise SessionError(f"n_past is {item.n_past}; the session holds {session.n_cached} tokens{branched}")
    if item.n_past + n > session.n_ctx:
        raise ContextFullError(
            f"{item.n_past} cached tokens and {n} new ones are over the session's {session.n_ctx}; open a longer one"
        )


def _parents(item: ForwardItem, n: int) -> list[int]:
    if item.parents is None:
        return list(range(-1, n - 1))
    parents = np.asarray(item.parents)
    if parents.shape != (n,) or not np.all((parents >= -1) & (parents < np.arange(n))):
        raise RequestError(f"parents must be {n} row numbers, each -1 or below its own row, found {parents.tolist()}")
    numbers: list[int] = parents.tolist()
    return numbers


def _layers(item: ForwardItem, n_layer: int) -> LayerSet | None:
    layers = item.layers
    if layers is not None and (layers.attn.shape != (n_layer,) or layers.mlp.shape != (n_layer,)):
        raise RequestError(f"layers must hold {n_layer} switches each, found {layers.attn.shape}, {layers.mlp.shape}")
    return layers


def _taps(item: ForwardItem, n_layer: int) -> tuple[int, ...]:
    if not all(_first_layer(item) <= tap < n_layer for tap in item.taps):
        raise RequestError(f"taps are {item.taps}; they must be layers that run, {_first_layer(item)} to {n_layer - 1}")
    return tuple(item.taps)


def _check_written(item: ForwardItem, session: ReferenceSession, layers: LayerSet | None) -> None:
    """Refuse to read keys and values that no forward has written."""
    for i in range(_first_layer(item), len(session.cache.written)):
        holes = np.flatnonzero(~session.cache.written[i, : item.n_past])
        if len(holes) and (layers is None or layers.attn[i]):
            raise SessionError(
                f"layer {i} has no keys and values at position {holes[0]}: the forward that put this token there "
                f"left the layer out; go back to n_past {holes[0]} or leave it out again"
            )


def _wanted(rows: Rows, n: int) -> NDArray[np.intp]:
    if isinstance(rows, str):
        if rows not in ("all", "last"):
            raise RequestError(f"rows is {rows!r}; it must be 'all', 'last' or row numbers")
        return np.arange(0 if rows == "all" else n - 1, n)
    wanted = np.asarray(rows, dtype=np.intp)
    if wanted.ndim != 1 or np.any((wanted < 0) | (wanted >= n)) or np.any(np.diff(wanted) <= 0):
        raise RequestError(f"rows must be ascending row numbers from 0 to {n - 1}, found {wanted.tolist()}")
    return wanted
