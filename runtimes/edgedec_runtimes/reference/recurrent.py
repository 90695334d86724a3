"""Layers with a recurrent state, one row at a time: the gated delta rule, and the state spaces of Mamba-2.

The gated delta rule: Yang et al. 2024, arXiv:2412.06464. Mamba-2: Dao and Gu 2024, arXiv:2405.21060.
"""

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.architectures.architecture import Recurrence
from edgedec_runtimes.reference.weights import Layer

Floats = NDArray[np.float32]


def recur(
    layer: Layer, sizes: Recurrence, x: Floats, before: tuple[Floats, Floats], epsilon: float
) -> tuple[Floats, Floats, Floats]:
    """Return a row's column, the states after it, and what the layer gives.

    Args:
        layer: The weights.
        sizes: Their sizes.
        x: f32[n_embd], the normed hidden state.
        before: The columns f32[n, n_column] of the rows before, at most length - 1, and the states f32[n_head, n_key,
            n_value] behind the last of them.
        epsilon: What norms add to the mean square.
    """
    columns, states = before
    column = layer["ssm_mix.weight"] @ x
    convolved = conv_step(
        np.concatenate([columns, column[None]]), layer["ssm_conv1d.weight"], layer.get("ssm_conv1d.bias")
    )
    rule = _by_space if sizes.rule == "space" else _by_delta
    states, result = rule(layer, sizes, x, convolved, states, epsilon)
    return column, states, layer["ssm_out.weight"] @ result


def _keys_of(sizes: Recurrence) -> NDArray[np.intp]:
    """Return the key head of each head."""
    heads = np.arange(sizes.n_head)
    return heads % sizes.n_key_head if sizes.tiled else heads // (sizes.n_head // sizes.n_key_head)


def _by_delta(
    layer: Layer, sizes: Recurrence, x: Floats, convolved: Floats, states: Floats, epsilon: float
) -> tuple[Floats, Floats]:
    """Return the states after a row, and f32[n_values]: each head's product, normed, times the SiLU of its gate."""
    n_keys, of_head = sizes.n_key_head * sizes.n_key, _keys_of(sizes)
    queries, keys, values = np.split(convolved, [n_keys, 2 * n_keys])
    queries, keys = (_unit(part.reshape(-1, sizes.n_key), epsilon)[of_head] for part in (queries, keys))
    alpha = layer["ssm_alpha.weight"] @ x
    if (of_gains := layer.get("ssm_beta.weight")) is not None:
        beta = of_gains @ x
    else:  # the rows of a key head are those of its heads' beta, then those of their alpha
        beta, alpha = (part.reshape(-1) for part in np.split(alpha.reshape(sizes.n_key_head, -1), 2, axis=1))
    decays, gains = np.exp(layer["ssm_a"] * _softplus(alpha + layer["ssm_dt.bias"])), sigmoid(beta)
    queries = queries / np.float32(sizes.n_key**0.5)
    states, result = delta_step(states, values.reshape(sizes.n_head, -1), keys, queries, decays, gains)
    return states, (_rms(result, epsilon) * layer["ssm_norm.weight"]).reshape(-1) * silu(layer["ssm_gate.weight"] @ x)


def _by_space(
    layer: Layer, sizes: Recurrence, x: Floats, convolved: Floats, states: Floats, epsilon: float
) -> tuple[Floats, Floats]:
    """Return the states after a row, and f32[n_values]: products and passed values, times the SiLU of gates, normed."""
    n_keys, of_head = sizes.n_key_head * sizes.n_key, _keys_of(sizes)
    values, keys, queries = np.split(convolved, [sizes.n_values, sizes.n_values + n_keys])
    values = values.reshape(sizes.n_head, -1)
    keys, queries = (part.reshape(-1, sizes.n_key)[of_head] for part in (keys, queries))
    times = _softplus(layer["ssm_alpha.weight"] @ x + layer["ssm_dt.bias"])
    states, result = space_step(states, values, keys, queries, times, layer["ssm_a"])
    result = (result + layer["ssm_d"][:, None] * values).reshape(-1) * silu(layer["ssm_gate.weight"] @ x)
    if (norm := layer.get("ssm_norm.weight")) is None:
        return states, result
    return states, _rms(result.reshape(sizes.n_key_head, -1), epsilon).reshape(-1) * norm


def conv_step(columns: Floats, kernels: Floats, bias: Floats | None) -> Floats:
    """Return the SiLU of the convolution at the last of some columns, f32[n, n_column], n at most `length`."""
    convolved = (columns.T * kernels[:, -len(columns) :]).sum(axis=1)
    return silu(convolved if bias is None else convolved + bias)


def delta_step(
    states: Floats, values: Floats, keys: Floats, queries: Floats, decays: Floats, gains: Floats
) -> tuple[Floats, Floats]:
    """Return the states of all heads after a row, and their products with its queries.

    A state forgets, then learns a value under a key: a gain's share of what the state's product with the key lacks.
    """
    states = states * decays[:, None, None]
    updates = gains[:, None] * (values - (keys[:, None] @ states)[:, 0])
    states = states + keys[:, :, None] * updates[:, None]
    return states, (queries[:, None] @ states)[:, 0]


def space_step(
    states: Floats, values: Floats, keys: Floats, queries: Floats, times: Floats, rates: Floats
) -> tuple[Floats, Floats]:
    """Return the states of all heads after a row, and their products with its queries.

    A state decays by its rate for a time, and takes in the value times the time, under the key.
    """
    decays = np.exp(rates * times)[:, None, None]
    states = states * decays + keys[:, :, None] * (values * times[:, None])[:, None]
    return states, (queries[:, None] @ states)[:, 0]


def silu(x: Floats) -> Floats:
    """Return x times its sigmoid."""
    return np.divide(x, np.float32(1) + np.exp(-np.maximum(x, np.float32(-80))))


def sigmoid(x: Floats) -> Floats:
    return np.divide(np.float32(1), np.float32(1) + np.exp(-np.maximum(x, np.float32(-80))))


def _softplus(x: Floats) -> Floats:
    return np.logaddexp(np.float32(0), x)


def _rms(x: Floats, epsilon: float) -> Floats:
    """Return the rows of x over the root of their mean square."""
    result: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon))
    return result


def _unit(x: Floats, epsilon: float) -> Floats:
    """Return the rows of x over their length."""
    result: Floats = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(epsilon))
    return result
