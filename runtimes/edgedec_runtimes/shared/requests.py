"""Checks of a forward's items, the same for all runtimes: everything is checked before anything is evaluated."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import ge
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, RequestError, SessionError
from edgedec.model import ForwardItem, LayerSet, Rows
from edgedec.model_card import Capabilities, ModelCard
from edgedec_runtimes.shared.session_state import CheckedItem, SessionState


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model's forwards are checked against.

    Attributes:
        card: The sizes of the model.
        capabilities: What the runtime can do with it.
        logit_rows: Most rows of logits of all items of a forward; of one item Capabilities.max_rows.
        tree_rows: Most rows of a tree, and of a block whose rows see each other.
    """

    card: ModelCard
    capabilities: Capabilities
    logit_rows: int
    tree_rows: int


def check_items(items: Sequence[ForwardItem], model: object, limits: Limits) -> list[CheckedItem]:
    """Check the items of a forward, each for a session of `model` that has a SessionState in `state`.

    Raises:
        ContextFullError, SessionError, RequestError, CapabilityError: As Session.forward; nothing has changed.
    """
    checked: list[CheckedItem] = []
    n_wanted = 0
    for item in items:
        if item.session.model is not model:
            raise SessionError("a forward was given a session of another model")
        checked.append(_check_item(item, limits))
        n_wanted += len(checked[-1].wanted)
    if len(items) > 1 and len({id(item.session) for item in items}) != len(items):
        raise RequestError("a session stands twice in one forward")
    if n_wanted > limits.logit_rows:
        _refuse_rows(n_wanted, limits.logit_rows)
    return checked


def _check_item(item: ForwardItem, limits: Limits) -> CheckedItem:
    session: Any = item.session
    state: SessionState = session.state
    if (item.tokens is None) == (item.hidden is None) or (item.hidden is None) != (item.resume_after is None):
        raise RequestError("a forward takes either tokens, or hidden together with resume_after")
    tokens = None if item.tokens is None else _tokens(item.tokens, limits)
    is_special = item.hidden is not None or item.layers is not None or bool(item.taps) or item.block is not None
    is_special = is_special or item.mass is not None
    if is_special or item.parents is not None or item.positions is not None:
        _require_capable(item, limits)
    hidden = None if item.hidden is None else _hidden(item.hidden, item.resume_after, limits)
    n = len(tokens) if tokens is not None else len(hidden) if hidden is not None else 0
    if item.block is not None or item.first:
        _check_block(item, n, limits)
    state.check_past(item.n_past, n)
    if not limits.capabilities.rollback and item.n_past not in (0, state.n_cached):
        raise CapabilityError(
            f"this model's state can't go back: n_past may be {state.n_cached} or 0, found {item.n_past}"
        )
    first_layer, n_layer = 0 if item.resume_after is None else item.resume_after + 1, limits.card.n_layer
    if item.taps and not all(first_layer <= tap < n_layer for tap in item.taps):
        raise RequestError(f"taps are {item.taps}; they must be layers that run, {first_layer} to {n_layer - 1}")
    parents = None if item.parents is None else _parents(item.parents, n)
    if parents is not None and n > limits.tree_rows:
        raise CapabilityError(
            f"a tree of {n} rows is over the {limits.tree_rows} rows that a forward of this model takes"
        )
    layers = None if item.layers is None else _layers(item.layers, n_layer)
    wanted, taps = _wanted(item.rows, n), tuple(item.taps)
    if len(wanted) > limits.capabilities.max_rows:
        _refuse_rows(len(wanted), limits.capabilities.max_rows)
    mass = None if item.mass is None else _mass(item, *item.mass, n, n_layer)
    positions = None if item.positions is None else _positions(item, item.positions, n)
    what = (tokens, hidden, n, first_layer, parents, layers, wanted, taps, is_special, item.block, item.first)
    checked = CheckedItem(session, item.n_past, *what, mass, positions)
    if state.n_whole < item.n_past:
        state.check_written(checked)
    return checked


def _refuse_rows(n_wanted: int, most: int) -> NoReturn:
    raise CapabilityError(
        f"{n_wanted} rows of logits were asked for; a forward of this model returns at most {most} (max_rows)"
    )


def _require_capable(item: ForwardItem, limits: Limits) -> None:
    """Raise CapabilityError where an item needs what the runtime does not declare."""
    needs = {
        "trees": item.parents is not None,
        "layers": item.layers is not None,
        "taps": bool(item.taps),
        "hidden_input": item.hidden is not None and item.resume_after != -1,
        "vector_rows": item.resume_after == -1 or item.block is not None,
        "attention_mass": item.mass is not None,
        "positions": item.positions is not None,
    }
    for name, is_needed in needs.items():
        if is_needed:
            limits.capabilities.require(name, limits.card.runtime)


_FAR = 1 << 24  # no position is as far as this
_LARGEST = np.float32(1e15)  # of a vector: sums of squares stay numbers
_INT32 = np.dtype(np.int32)
_ONE_ROW = np.zeros(1, np.int32)


def _wanted(rows: Rows, n: int) -> NDArray[np.int32]:
    """Return the row numbers that "all", "last" or an array stands for."""
    if isinstance(rows, str):
        if rows not in ("all", "last"):
            raise RequestError(f"rows is {rows!r}; it must be 'all', 'last' or row numbers")
        return _ONE_ROW if n == 1 else np.arange(0 if rows == "all" else n - 1, n, dtype=np.int32)
    wanted = np.asarray(rows)
    is_rows = wanted.ndim == 1 and (wanted.dtype.kind in "iu" or not len(wanted))
    if not is_rows or np.any((wanted < 0) | (wanted >= n)) or np.any(np.diff(wanted) <= 0):
        raise RequestError(f"rows must be ascending row numbers from 0 to {n - 1}, found {wanted.tolist()}")
    return np.ascontiguousarray(wanted, dtype=np.int32)


def _tokens(given: NDArray[np.int32], limits: Limits) -> NDArray[np.int32]:
    is_one = type(given) is np.ndarray and given.shape == (1,) and given.dtype is _INT32
    if is_one and 0 <= given.item() < limits.card.n_vocab:  # a step, whose id is checked without numpy
        return given
    tokens = np.asarray(given)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise RequestError(f"tokens are {tokens.dtype}{list(tokens.shape)}; they must be a row of at least one id")
    ids = tokens.tolist()  # a list, as numpy's reductions of one number take longer than the rest of the checks
    if min(ids) < 0 or max(ids) >= limits.card.n_vocab:
        raise RequestError(f"a token id is outside the vocabulary of {limits.card.n_vocab}")
    return np.ascontiguousarray(tokens, dtype=np.int32)


def _hidden(given: NDArray[np.float32], resume_after: int | None, limits: Limits) -> NDArray[np.float32]:
    hidden, n_embd, n_layer = np.ascontiguousarray(given, dtype=np.float32), limits.card.n_embd, limits.card.n_layer
    if resume_after not in range(-1, n_layer):
        raise RequestError(f"resume_after is {resume_after}; it must be -1 to {n_layer - 1}")
    widths = range(n_embd, n_embd * (n_layer + 1) + 1, n_embd) if resume_after == -1 else (n_embd,)
    if hidden.ndim != 2 or hidden.shape[1] not in widths or not len(hidden):
        several = " or a multiple" if resume_after == -1 else ""
        raise RequestError(f"hidden has the shape {hidden.shape}; it must be (rows from 1, {n_embd}{several})")
    if resume_after == -1 and not (np.abs(hidden) < _LARGEST).all():
        raise RequestError(f"a vector has an element that is no number or not below {_LARGEST:g}; encode again")
    return hidden


def _mass(
    item: ForwardItem, layers: tuple[int, ...], given: NDArray[np.float32], n: int, n_layer: int
) -> tuple[tuple[int, ...], NDArray[np.float32]]:
    """Return the layers whose attention is added up, and f32[n], what that of each row is multiplied by."""
    weights = np.asarray(given, np.float32)
    if item.tokens is None or item.parents is not None:
        raise RequestError("the mass of attention is that of a chain of tokens; leave `mass` out for other rows")
    if not all(0 <= layer < n_layer for layer in layers):
        raise RequestError(f"the mass of layers {layers} was asked for; the model has layers 0 to {n_layer - 1}")
    if weights.ndim != 1 or not 1 <= len(weights) <= n or not np.isfinite(weights).all():
        raise RequestError(f"mass has numbers of the shape {weights.shape}; it must have 1 to {n}, one for a last row")
    return tuple(layers), np.concatenate([np.zeros(n - len(weights), np.float32), weights])


def _positions(item: ForwardItem, given: NDArray[np.int32], n: int) -> NDArray[np.int32]:
    positions = np.asarray(given)
    if item.tokens is None or item.parents is not None:
        raise RequestError("a chain of tokens has positions of its own; leave `positions` out for other rows")
    is_row = positions.shape == (n,) and positions.dtype.kind in "iu"
    if not is_row or positions.min() < 0 or positions.max() >= _FAR:
        raise RequestError(f"positions have the shape {positions.shape}; they must be {n} numbers from 0 to {_FAR - 1}")
    return np.ascontiguousarray(positions, dtype=np.int32)


def _check_block(item: ForwardItem, n: int, limits: Limits) -> None:
    """Refuse rows that are not those of the block that they are said to be in, or that must not be cut."""
    block, first = item.block, item.first
    if block is not None and item.tokens is not None:
        if not block.mutual or block.n_rows < 1 or first or item.parents is not None:
            raise RequestError(
                "tokens that see each other have a mutual block of at least 1 row, no `first`, no parents"
            )
        if n > limits.tree_rows:
            raise CapabilityError(f"{n} rows see each other; a forward of this model takes {limits.tree_rows} at most")
        return
    if block is None or item.resume_after != -1 or item.parents is not None:
        raise RequestError("a picture's block has vectors (resume_after=-1) and no parents, and `first` is for blocks")
    if block.n_x < 1 or not 0 <= first <= min(item.n_past, block.n_rows - n):
        raise RequestError(f"rows {first} to {first + n - 1} are not in a block of {block.n_rows} rows")
    if block.mutual and n != block.n_rows:
        raise RequestError(f"a block of {block.n_rows} rows that see each other came in parts; evaluate it whole")
    if block.mutual and n > limits.tree_rows:
        raise CapabilityError(
            f"{n} rows of a picture see each other; a forward of this model takes at most {limits.tree_rows} such "
            "rows: ask for fewer tokens for a picture, or use the llamacpp runtime"
        )


def _parents(given: NDArray[np.int32], n: int) -> NDArray[np.int32]:
    parents = np.asarray(given)
    is_rows = parents.shape == (n,) and parents.dtype.kind in "iu"
    above = parents.tolist()
    if not is_rows or min(above) < -1 or any(map(ge, above, range(n))):
        raise RequestError(f"parents must be {n} row numbers, each -1 or below its own row, found {above}")
    return np.ascontiguousarray(parents, dtype=np.int32)


def _layers(layers: LayerSet, n_layer: int) -> LayerSet:
    if layers.attn.shape != (n_layer,) or layers.mlp.shape != (n_layer,):
        raise RequestError(f"layers must hold {n_layer} switches each, found {layers.attn.shape}, {layers.mlp.shape}")
    return layers
