"""Random tensors and metadata of Mamba-2 mixers (Dao and Gu 2024, arXiv:2405.21060), as GGUF files have them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.tensor_types import GGMLType
from support.models.gguf_writer import RawTensor


@dataclass(frozen=True, slots=True)
class StateSpace:
    """The sizes of a mixer.

    Attributes:
        n_inner: Elements of all heads together.
        n_head: Heads; each has n_inner / n_head elements, and a state of that many rows of n_state numbers.
        n_group: Groups of heads that share what is written to the state and what it is read with.
        length: Tokens that the convolution goes over.
        is_normed: The output has a norm over each group.
    """

    n_inner: int = 512
    n_head: int = 8
    n_state: int = 32
    n_group: int = 1
    length: int = 4
    is_normed: bool = True

    @property
    def n_convolved(self) -> int:
        """Elements that the convolution goes over."""
        return self.n_inner + 2 * self.n_group * self.n_state


SMALL = StateSpace()


def mixer_keys(space: StateSpace) -> dict[str, int]:
    """Return a mixer's metadata, below the architecture's name."""
    return {
        "ssm.conv_kernel": space.length,
        "ssm.inner_size": space.n_inner,
        "ssm.state_size": space.n_state,
        "ssm.time_step_rank": space.n_head,
        "ssm.group_count": space.n_group,
    }


def mixer_tensors(
    space: StateSpace, n_embd: int, matrix: Callable[..., RawTensor], rng: np.random.Generator
) -> dict[str, RawTensor]:
    """Return a mixer's tensors.

    Args:
        space: Its sizes.
        n_embd: Elements of a hidden state.
        matrix: Makes a random matrix of so many rows and columns, and a gain.
        rng: What the vectors are drawn from.
    """
    n = space.n_convolved
    by_group = (space.n_group, space.n_inner // space.n_group)
    tensors = {
        "ssm_in.weight": matrix(space.n_inner + n + space.n_head, n_embd, 1.5),
        "ssm_conv1d.weight": _floats(0.5 * rng.standard_normal((n, space.length))),
        "ssm_conv1d.bias": _floats(0.1 * rng.standard_normal(n)),
        "ssm_dt.bias": _floats(rng.standard_normal(space.n_head)),
        "ssm_a": _floats(-np.exp(rng.standard_normal((space.n_head, 1)))),
        "ssm_d": _floats(1 + 0.1 * rng.standard_normal((space.n_head, 1))),
        "ssm_out.weight": matrix(n_embd, space.n_inner),
    }
    if space.is_normed:
        tensors["ssm_norm.weight"] = _floats(1 + 0.1 * rng.standard_normal(by_group))
    return tensors


def _floats(values: NDArray[np.float64]) -> RawTensor:
    return RawTensor(GGMLType.F32, values.shape[::-1], values.astype(np.float32).tobytes())


class Mixer:
    """A mixer in float64, one token after another.

    The state of a head decays by exp(dt a) at each token, and the outer product of x dt and B is added to it; what it
    gives is its product with C, plus D x, gated by the SiLU of z before the norm.
    """

    def __init__(self, space: StateSpace, weight: Callable[[str], Any], epsilon: float) -> None:
        self._space, self._weight, self._epsilon = space, weight, epsilon
        self._columns = np.zeros((space.length - 1, space.n_convolved))
        self._state = np.zeros((space.n_head, space.n_inner // space.n_head, space.n_state))

    def step(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what the mixer makes of the next token's normed hidden state."""
        s, w = self._space, self._weight
        n, groups = s.n_inner, np.arange(s.n_head) // (s.n_head // s.n_group)
        z, column, times = np.split(w("ssm_in.weight") @ x, [n, n + s.n_convolved])
        window = np.vstack([self._columns, column])
        self._columns = window[1:]
        mixed = silu((window.T * w("ssm_conv1d.weight")).sum(axis=1) + w("ssm_conv1d.bias"))
        values, keys, queries = np.split(mixed, [n, n + s.n_group * s.n_state])
        values = values.reshape(s.n_head, -1)
        keys, queries = (part.reshape(s.n_group, s.n_state)[groups] for part in (keys, queries))
        dt = np.logaddexp(0, times + w("ssm_dt.bias"))[:, None]
        decay = np.exp(dt * w("ssm_a"))
        self._state = self._state * decay[:, :, None] + (values * dt)[:, :, None] * keys[:, None, :]
        y = np.einsum("hpn,hn->hp", self._state, queries) + w("ssm_d") * values
        y = y.ravel() * silu(z)
        if s.is_normed:
            y = rms_norm(y.reshape(s.n_group, -1), w("ssm_norm.weight"), self._epsilon).ravel()
        result: NDArray[np.float64] = w("ssm_out.weight") @ y
        return result


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return x times its sigmoid."""
    result: NDArray[np.float64] = x / (1 + np.exp(-x))
    return result


def rms_norm(x: NDArray[np.float64], weight: NDArray[np.float64], epsilon: float) -> NDArray[np.float64]:
    """Return the rows of x divided by the root of their mean square, times a weight."""
    result: NDArray[np.float64] = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight
    return result
