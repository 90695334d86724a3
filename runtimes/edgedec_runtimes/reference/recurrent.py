"""Layers with a recurrent state, one row at a time: the gated delta rule, and the state spaces of Mamba-2.

The gated delta rule: Yang et al. 2024, arXiv:2412.06464. Mamba-2: Dao and Gu 2024, arXiv:2405.21060.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.architectures.architecture import Recurrence

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """The weights of a layer with a recurrent state.

    Attributes:
        mix: f32[n_column, n_embd], what the convolution goes over: queries, keys and values, or values, keys and
            queries of a state space.
        gate: f32[n_values, n_embd]; the SiLU of its product multiplies the result.
        alpha: f32[n_head, n_embd], of how much of the state is kept; with the rows of beta among them where that is
            None and the rule has one: for each key head those of beta, then those of alpha.
        beta: f32[n_head, n_embd], of how much is learned (the delta rule).
        output: f32[n_embd, n_values].
        kernels, kernel_bias: Of the convolution, f32[n_column, length] and f32[n_column].
        bias, rate: f32[n_head]; e^(rate * softplus(alpha + bias)) of a head's state is kept.
        norm: f32[n_value], or f32[n_values] of a state space.
        passed: f32[n_head], how much of a value is added to the result (of a state space).
    """

    mix: Floats
    gate: Floats
    alpha: Floats
    beta: Floats | None
    output: Floats
    kernels: Floats
    kernel_bias: Floats | None
    bias: Floats
    rate: Floats
    norm: Floats | None
    passed: Floats | None

    def arrays(self) -> list[Floats]:
        """Return all of them."""
        arrays_of = [self.mix, self.gate, self.alpha, self.beta, self.output, self.kernels, self.kernel_bias]
        return [array for array in (*arrays_of, self.bias, self.rate, self.norm, self.passed) if array is not None]


def recur(
    weights: RecurrentWeights, sizes: Recurrence, x: Floats, before: tuple[Floats, Floats], epsilon: float
) -> tuple[Floats, Floats, Floats]:
    """Return a row's column, the states after it, and what the layer gives.

    Args:
        weights: The layer's.
        sizes: Their sizes.
        x: f32[n_embd], the normed hidden state.
        before: The columns f32[n, n_column] of the rows before, at most length - 1, and the states f32[n_head, n_key,
            n_value] behind the last of them.
        epsilon: What norms add to the mean square.
    """
    columns, states = before
    column = weights.mix @ x
    convolved = conv_step(np.concatenate([columns, column[None]]), weights.kernels, weights.kernel_bias)
    rule = _by_space if sizes.rule == "space" else _by_delta
    states, result = rule(weights, sizes, x, convolved, states, epsilon)
    return column, states, weights.output @ result


def _keys_of(sizes: Recurrence) -> NDArray[np.intp]:
    """Return the key head of each head."""
    heads = np.arange(sizes.n_head)
    return heads % sizes.n_key_head if sizes.tiled else heads // (sizes.n_head // sizes.n_key_head)


def _by_delta(
    weights: RecurrentWeights, sizes: Recurrence, x: Floats, convolved: Floats, states: Floats, epsilon: float
) -> tuple[Floats, Floats]:
    """Return the states after a row, and f32[n_values]: each head's product, normed, times the SiLU of its gate."""
    n_keys, of_head = sizes.n_key_head * sizes.n_key, _keys_of(sizes)
    queries, keys, values = np.split(convolved, [n_keys, 2 * n_keys])
    queries, keys = (_unit(part.reshape(-1, sizes.n_key), epsilon)[of_head] for part in (queries, keys))
    alpha = weights.alpha @ x
    if weights.beta is not None:
        beta = weights.beta @ x
    else:
        beta, alpha = (part.reshape(-1) for part in np.split(alpha.reshape(sizes.n_key_head, -1), 2, axis=1))
    decays, gains = np.exp(weights.rate * _softplus(alpha + weights.bias)), sigmoid(beta)
    queries = queries / np.float32(sizes.n_key**0.5)
    states, result = delta_step(states, values.reshape(sizes.n_head, -1), keys, queries, decays, gains)
    assert weights.norm is not None, "the results of the delta rule are normed"
    return states, (_rms(result, epsilon) * weights.norm).reshape(-1) * silu(weights.gate @ x)


def _by_space(
    weights: RecurrentWeights, sizes: Recurrence, x: Floats, convolved: Floats, states: Floats, epsilon: float
) -> tuple[Floats, Floats]:
    """Return the states after a row, and f32[n_values]: products and passed values, times the SiLU of gates, normed."""
    n_keys, of_head = sizes.n_key_head * sizes.n_key, _keys_of(sizes)
    values, keys, queries = np.split(convolved, [sizes.n_values, sizes.n_values + n_keys])
    values = values.reshape(sizes.n_head, -1)
    keys, queries = (part.reshape(-1, sizes.n_key)[of_head] for part in (keys, queries))
    times = _softplus(weights.alpha @ x + weights.bias)
    states, result = space_step(states, values, keys, queries, times, weights.rate)
    assert weights.passed is not None, "a state space passes a part of its values on"
    result = (result + weights.passed[:, None] * values).reshape(-1) * silu(weights.gate @ x)
    if weights.norm is None:
        return states, result
    return states, _rms(result.reshape(sizes.n_key_head, -1), epsilon).reshape(-1) * weights.norm


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
    result: Floats = np.divide(x, np.float32(1) + np.exp(-np.maximum(x, np.float32(-80))))
    return result


def sigmoid(x: Floats) -> Floats:
    result: Floats = np.divide(np.float32(1), np.float32(1) + np.exp(-np.maximum(x, np.float32(-80))))
    return result


def _softplus(x: Floats) -> Floats:
    result: Floats = np.logaddexp(np.float32(0), x)
    return result


def _rms(x: Floats, epsilon: float) -> Floats:
    """Return the rows of x over the root of their mean square."""
    result: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon))
    return result


def _unit(x: Floats, epsilon: float) -> Floats:
    """Return the rows of x over their length."""
    result: Floats = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(epsilon))
    return result
