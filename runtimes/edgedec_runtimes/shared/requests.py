"""Checks of a forward's items, the same for all runtimes: everything is checked before anything is evaluated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import ge
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, RequestError, SessionError
from edgedec.model import ALL_LAYERS, ForwardItem, LayerSet, RowGroup, Rows, Span
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
        n_wanted += len(checked[-1].logit_rows)
    if len(items) > 1 and len({id(item.session) for item in items}) != len(items):
        raise RequestError("a session stands twice in one forward")
    if n_wanted > limits.logit_rows:
        _refuse_rows(n_wanted, limits.logit_rows)
    return checked


def _check_item(item: ForwardItem, limits: Limits) -> CheckedItem:
    session: Any = item.session
    state: SessionState = session.state
    if not item.groups:
        raise RequestError("a forward has no group of rows; it takes at least one")
    group, parents, positions = item.groups[0], None, None
    is_one = len(item.groups) == 1 and group.vectors is None and group.tokens is not None
    is_plain = is_one and group.span is ALL_LAYERS and group.sees is None and group.positions is None
    is_plain, is_special = is_plain and not item.taps and not item.mass, False
    if not is_plain:  # no step
        is_special = not is_one or group.span != ALL_LAYERS or bool(item.taps or item.mass or group.block)
        _require_capable(item, limits)
    groups = (_group(group, limits),) if is_one else tuple(_group(each, limits) for each in item.groups)
    tokens = groups[0].tokens
    n = len(tokens) if is_one and tokens is not None else sum([each.n_rows for each in groups])
    for each in groups if is_special else ():
        _check_block(item, each, limits)
    state.check_past(item.n_past, n)
    if not limits.capabilities.rollback and item.n_past not in (0, state.n_cached):
        raise CapabilityError(
            f"this model's state can't go back: n_past may be {state.n_cached} or 0, found {item.n_past}"
        )
    if item.taps:
        first_layer, n_layer = min(each.span.enter for each in groups), limits.card.n_layer
        if not all(first_layer <= tap < n_layer for tap in item.taps):
            raise RequestError(f"taps are {item.taps}; they must be layers that run, {first_layer} to {n_layer - 1}")
    if not is_plain and item.is_tree:
        parents = _parents(groups, n)
        if n > limits.tree_rows:
            raise CapabilityError(
                f"a tree of {n} rows is over the {limits.tree_rows} rows that a forward of this model takes"
            )
    mask = _wanted(item.rows, n)
    if len(mask) > limits.capabilities.max_rows:
        _refuse_rows(len(mask), limits.capabilities.max_rows)
    mass = _mass(item, n, limits.card.n_layer) if item.mass else {}
    if not is_plain and any(each.positions is not None for each in groups):
        positions = np.concatenate([_positions(each) for each in groups])
    checked = CheckedItem(session, item.n_past, groups, n, parents, mask, tuple(item.taps), mass)
    checked.positions, checked.is_special = positions, is_special
    if state.n_whole < item.n_past or len(groups) > 1:
        state.check_written(checked)
    return checked


def _group(group: RowGroup, limits: Limits) -> RowGroup:
    """Return a group with arrays of the types that a runtime reads, and its span as layers that run."""
    span, n_layer = group.span, limits.card.n_layer
    if (group.tokens is None) == (group.vectors is None) or (group.tokens is not None and span.enter):
        raise RequestError("rows are either tokens, which enter layer 0, or vectors")
    if span is not ALL_LAYERS:
        if span.enter not in range(n_layer + 1):
            raise RequestError(f"rows enter layer {span.enter}; it must be 0 to {n_layer}")
        span = _layers(span, n_layer)
    if group.vectors is not None:
        return replace(group, vectors=_vectors(group.vectors, span.enter, limits), span=span)
    assert group.tokens is not None, "rows are tokens or vectors"
    tokens = _tokens(group.tokens, limits)
    return group if tokens is group.tokens and span is group.span else replace(group, tokens=tokens, span=span)


def _refuse_rows(n_wanted: int, most: int) -> NoReturn:
    raise CapabilityError(
        f"{n_wanted} rows of logits were asked for; a forward of this model returns at most {most} (max_rows)"
    )


def _require_capable(item: ForwardItem, limits: Limits) -> None:
    """Raise CapabilityError where an item needs what the runtime does not declare."""
    groups = item.groups
    needs = {
        "groups": len(groups) > 1,
        "trees": item.is_tree,
        "layers": any(each.span.leave is not None or each.span.layers is not None for each in groups),
        "taps": bool(item.taps),
        "hidden_input": any(each.vectors is not None and each.span.enter for each in groups),
        "vector_rows": any(each.block or (each.vectors is not None and not each.span.enter) for each in groups),
        "attention_mass": bool(item.mass),
        "positions": any(each.positions is not None for each in groups),
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
    row_numbers = np.asarray(rows)
    is_rows = row_numbers.ndim == 1 and (row_numbers.dtype.kind in "iu" or not len(row_numbers))
    if not is_rows or np.any((row_numbers < 0) | (row_numbers >= n)) or np.any(np.diff(row_numbers) <= 0):
        raise RequestError(f"rows must be ascending row numbers from 0 to {n - 1}, found {row_numbers.tolist()}")
    return np.ascontiguousarray(row_numbers, dtype=np.int32)


def _tokens(raw: NDArray[np.int32], limits: Limits) -> NDArray[np.int32]:
    is_one = type(raw) is np.ndarray and raw.shape == (1,) and raw.dtype is _INT32
    if is_one and 0 <= raw.item() < limits.card.n_vocab:  # a step, whose id is checked without numpy
        return raw
    tokens = np.asarray(raw)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise RequestError(f"tokens are {tokens.dtype}{list(tokens.shape)}; they must be a row of at least one id")
    ids = tokens.tolist()  # a list, as numpy's reductions of one number take longer than the rest of the checks
    if min(ids) < 0 or max(ids) >= limits.card.n_vocab:
        raise RequestError(f"a token id is outside the vocabulary of {limits.card.n_vocab}")
    return np.ascontiguousarray(tokens, dtype=np.int32)


def _vectors(raw: NDArray[np.float32], enter: int, limits: Limits) -> NDArray[np.float32]:
    vectors, n_embd, n_layer = np.ascontiguousarray(raw, dtype=np.float32), limits.card.n_embd, limits.card.n_layer
    widths = (n_embd,) if enter else range(n_embd, n_embd * (n_layer + 1) + 1, n_embd)
    if vectors.ndim != 2 or vectors.shape[1] not in widths or not len(vectors):
        several = "" if enter else " or a multiple"
        raise RequestError(f"vectors have the shape {vectors.shape}; it must be (rows from 1, {n_embd}{several})")
    if not enter and not (np.abs(vectors) < _LARGEST).all():
        raise RequestError(f"a vector has an element that is no number or not below {_LARGEST:g}; encode again")
    return vectors


def _mass(item: ForwardItem, n: int, n_layer: int) -> dict[int, NDArray[np.float32]]:
    """Return by layer f32[n], what the attention of each row is multiplied by."""
    if item.is_tree or any(group.tokens is None for group in item.groups):
        raise RequestError("the mass of attention is that of a chain of tokens; leave `mass` out for other rows")
    if not all(0 <= layer < n_layer for layer in item.mass):
        raise RequestError(f"the mass of layers {[*item.mass]} was asked for; the model has layers 0 to {n_layer - 1}")
    weights = {layer: np.asarray(row, np.float32) for layer, row in item.mass.items()}
    shapes = {each.shape for each in weights.values()}
    for each in weights.values():
        if len(shapes) > 1 or each.ndim != 1 or not 1 <= len(each) <= n or not np.isfinite(each).all():
            raise RequestError(f"mass has numbers of the shapes {shapes}; it must have 1 to {n}, one for a last row")
    return {layer: np.concatenate([np.zeros(n - len(each), np.float32), each]) for layer, each in weights.items()}


def _positions(group: RowGroup) -> NDArray[np.int32]:
    n, positions = group.n_rows, np.asarray(group.positions)
    if group.tokens is None or group.parents is not None:
        raise RequestError("a chain of tokens has positions of its own; leave `positions` out for other rows")
    is_row = positions.shape == (n,) and positions.dtype.kind in "iu"
    if not is_row or positions.min() < 0 or positions.max() >= _FAR:
        raise RequestError(f"positions have the shape {positions.shape}; they must be {n} numbers from 0 to {_FAR - 1}")
    return np.ascontiguousarray(positions, dtype=np.int32)


def _check_block(item: ForwardItem, group: RowGroup, limits: Limits) -> None:
    """Refuse rows that are not those of the block that they are said to be in, or that must not be cut."""
    block, n = group.block, group.n_rows
    if block is None:
        return
    if len(item.groups) > 1 or group.span.enter:
        raise RequestError("a block's rows enter layer 0, and no other group is in their item; evaluate it alone")
    if group.tokens is not None:
        if not block.mutual or block.n_rows < 1 or block.first:
            raise RequestError("tokens that see each other have a mutual block of at least 1 row, from its first one")
        if n > limits.tree_rows:
            raise CapabilityError(f"{n} rows see each other; a forward of this model takes {limits.tree_rows} at most")
        return
    if block.n_x < 1 or not 0 <= block.first <= min(item.n_past, block.n_rows - n):
        last = block.first + n - 1
        raise RequestError(f"rows {block.first} to {last} are not in a block of {block.n_rows} rows")
    if block.mutual and n != block.n_rows:
        raise RequestError(f"a block of {block.n_rows} rows that see each other came in parts; evaluate it whole")
    if block.mutual and n > limits.tree_rows:
        raise CapabilityError(
            f"{n} rows of a picture see each other; a forward of this model takes at most {limits.tree_rows} such "
            "rows: ask for fewer tokens for a picture, or use the llamacpp runtime"
        )


def _parents(groups: Sequence[RowGroup], n: int) -> NDArray[np.int32]:
    """Return int32[n], the parent of each row: in a chain the row before it."""
    every, begin = np.arange(-1, n - 1, dtype=np.int32), 0
    for group in groups:
        if group.parents is not None:
            parents = np.asarray(group.parents)
            numbers, above = range(begin, begin + group.n_rows), parents.tolist()
            is_rows = parents.shape == (group.n_rows,) and parents.dtype.kind in "iu"
            if not is_rows or min(above) < -1 or any(map(ge, above, numbers)):
                raise RequestError(
                    f"parents must be {group.n_rows} row numbers, each -1 or below its own row, found {above}"
                )
            every[begin : begin + group.n_rows] = parents
        begin += group.n_rows
    return every


def _layers(span: Span, n_layer: int) -> Span:
    """Return a span in which the layers behind its end are left out."""
    layers, leave = span.layers, span.leave
    if layers is not None and (layers.attn.shape != (n_layer,) or layers.mlp.shape != (n_layer,)):
        raise RequestError(f"layers must hold {n_layer} switches each, found {layers.attn.shape}, {layers.mlp.shape}")
    if leave is None:
        return span
    if not span.enter <= leave <= n_layer:
        raise RequestError(f"rows leave before layer {leave}; it must be {span.enter} to {n_layer}")
    before = LayerSet.of(n_layer, range(leave))
    if layers is not None:
        before = LayerSet(before.attn & layers.attn, before.mlp & layers.mlp)
    return Span(span.enter, None, before)
